// Functions of the stand-in for NCCL (fake_nccl.cc) in addition to NCCL's own, to be found by dlsym.
#pragma once

extern "C" {

// Runs work(argument) on a stream, after all earlier work. If no function was set, the stand-in looks for
// `sordino_fake_enqueue` in the program.
using FakeEnqueue = void (*)(void* stream, void (*work)(void*), void* argument);
void fake_nccl_set_enqueue(FakeEnqueue enqueue);

// Sets the identity of the calling thread's current device. 0, the initial value, equals no other device.
void fake_nccl_set_device(unsigned long long identity);

// Makes every communicator in which this process has that rank fail with `result` (an ncclResult_t).
void fake_nccl_break(int rank, int result);

// From now on no communicator can be created: ncclCommInitRankConfig returns `result`. 0 ends this.
void fake_nccl_refuse(int result);

// From now on ncclCommAbort does not return, until this is called with 0.
void fake_nccl_hang_aborts(int hang);

// Returns the number of communicators that are neither destroyed nor aborted.
int fake_nccl_live();
// Returns the number of groups that communicators of one rank of this process have put on a stream; a call outside a
// group counts as one.
int fake_nccl_groups(int rank);
// Returns the number of calls of ncclCommAbort so far.
int fake_nccl_aborts();
}
