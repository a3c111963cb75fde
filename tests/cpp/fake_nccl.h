// What the stand-in for NCCL (fake_nccl.cc) has beyond NCCL's own functions, to be found by dlsym.
#pragma once

extern "C" {

// Runs work(argument) on a stream, after what was put there before. If nobody has said how, the stand-in looks for
// `sordino_fake_enqueue` in the program.
using FakeEnqueue = void (*)(void* stream, void (*work)(void*), void* argument);
void fake_nccl_set_enqueue(FakeEnqueue enqueue);

// The hardware that is the calling thread's current device; 0 (which it is at first): unlike any other.
void fake_nccl_set_device(unsigned long long identity);

// Every communicator in which this process has that rank has failed with `result` (an ncclResult_t).
void fake_nccl_break(int rank, int result);

// From now on ncclCommAbort does not return; until it is called with 0.
void fake_nccl_hang_aborts(int hang);

// Communicators that are neither destroyed nor aborted.
int fake_nccl_live();
// Groups that communicators of one rank of this process have put on a stream; a call outside a group is one.
int fake_nccl_groups(int rank);
// Calls of ncclCommAbort so far.
int fake_nccl_aborts();
}
