// What this compiler's headers use of a C library newer than 2.28, in terms of what that has; linked statically and
// hidden (older_system.py). x86-64.
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

// Since 2.32: whether atomic counters of std::shared_ptr may be plain ones. Never.
char __libc_single_threaded = 0;

// Since 2.33 functions; before that they were inline, and called these.
int __xstat(int version, const char* path, struct stat* found);
int __lxstat(int version, const char* path, struct stat* found);
int __fxstat(int version, int file, struct stat* found);
enum { kVersion = 1 };
int stat(const char* path, struct stat* found) { return __xstat(kVersion, path, found); }
int lstat(const char* path, struct stat* found) { return __lxstat(kVersion, path, found); }
int fstat(int file, struct stat* found) { return __fxstat(kVersion, file, found); }

// Since 2.30. Before that conditions are waited for by the wall clock only, as std::condition_variable did then: who
// waits looks at his own clock when he is woken.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  struct timespec now, wall;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &wall) != 0) return EINVAL;
  wall.tv_sec += until->tv_sec - now.tv_sec;
  wall.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) {
    wall.tv_nsec += 1000000000;
    --wall.tv_sec;
  } else if (wall.tv_nsec >= 1000000000) {
    wall.tv_nsec -= 1000000000;
    ++wall.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &wall);
}
