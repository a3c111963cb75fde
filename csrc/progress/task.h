// Task: an operation as a coroutine. It states the condition that it waits for, and the engine resumes it once the
// condition is true.
//
//   Task step() { ...; co_await until([&] { return has_come(); }); ...; co_await another_task(); }
//
// Nothing here knows a collective or a transport. A Task runs on the thread that calls resume(), and never on two at
// once. Exceptions travel to the awaiting task and out of the outermost resume().
#pragma once

#include <coroutine>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace sordino {

// Condition that a task waits for. `ready` must be cheap, and without side effects that matter when it returns false.
// Empty: no wait.
struct Until {
  std::function<bool()> ready;
};
inline Until until(std::function<bool()> ready) { return Until{std::move(ready)}; }

// Lets the tasks that run together with this one continue first.
inline Until others_first() {
  return until([asked = false]() mutable { return std::exchange(asked, true); });
}

class Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  // Shared by a chain of nested tasks: the innermost coroutine, and the condition it waits for.
  struct Chain {
    std::coroutine_handle<> leaf;
    std::function<bool()> waiting_for;
  };

  struct promise_type {
    Chain own;
    Chain* chain = &own;
    std::coroutine_handle<> parent;
    std::exception_ptr error;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    auto final_suspend() noexcept {
      struct BackToParent {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(Handle self) noexcept {
          promise_type& promise = self.promise();
          if (!promise.parent) return std::noop_coroutine();
          promise.chain->leaf = promise.parent;
          return promise.parent;
        }
        void await_resume() noexcept {}
      };
      return BackToParent{};
    }

    auto await_transform(Until wait) {
      struct Awaiter {
        promise_type* promise;
        std::function<bool()> ready;
        bool await_ready() { return !ready || ready(); }
        void await_suspend(std::coroutine_handle<>) { promise->chain->waiting_for = std::move(ready); }
        void await_resume() {}
      };
      return Awaiter{this, std::move(wait.ready)};
    }

    auto await_transform(Task&& inner) {
      struct Awaiter {
        promise_type* promise;
        Task inner;
        bool await_ready() { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<> self) {
          promise_type& child = inner.handle_.promise();
          child.chain = promise->chain;
          child.parent = self;
          promise->chain->leaf = inner.handle_;
          return inner.handle_;
        }
        void await_resume() {
          if (inner.handle_.promise().error) std::rethrow_exception(inner.handle_.promise().error);
        }
      };
      return Awaiter{this, std::move(inner)};
    }
  };

  Task() = default;
  explicit Task(Handle handle) : handle_(handle) { handle_.promise().own.leaf = handle_; }
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (handle_) handle_.destroy();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  explicit operator bool() const { return static_cast<bool>(handle_); }
  bool done() const { return handle_.done(); }

  // Runs until the next wait whose condition is false. Returns whether anything ran; throws what the task threw.
  bool resume() {
    Chain& chain = handle_.promise().own;
    if (handle_.done()) return false;
    if (chain.waiting_for) {
      if (!chain.waiting_for()) return false;
      chain.waiting_for = nullptr;
    }
    chain.leaf.resume();
    if (handle_.done() && handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return true;
  }

 private:
  Handle handle_;
};

// Runs tasks concurrently: each continues once its condition is true. Done when all are; the first exception ends it.
inline Task together(std::vector<Task> tasks) {
  for (bool over = false; !over;) {
    co_await until([&tasks, &over] {
      bool moved = false;
      over = true;
      for (Task& task : tasks) {
        if (task.done()) continue;
        moved |= task.resume();
        over &= task.done();
      }
      return moved || over;
    });
  }
}

}  // namespace sordino
