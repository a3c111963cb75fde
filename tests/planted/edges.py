"""Errors at the edges of the core: signals, forked children, tensors with unusual memory."""

from __future__ import annotations

from planted.error import Error, checks

_WORLD = "csrc/engine/world.cc"
_TENSORS = "python/sordino/runtime/tensors.py"
_INTERRUPTS = ("tests/mp/test_interrupts.py",)
_FORK = ("tests/python/runtime/test_fork.py",)
_STORAGE = (checks("storage"),)

ERRORS = [
    Error(
        "signals are delayed while a rank waits",
        "missing wait",
        "csrc/progress/progress.cc",
        "    if (interrupts.due()) interrupts.call(waiter);\n",
        "",
        _INTERRUPTS,
    ),
    Error(
        "an interrupted wait does not fail the world",
        "forgotten rollback",
        _WORLD,
        "    if (!name.empty()) interrupted(name);\n",
        "",
        _INTERRUPTS,
    ),
    Error(
        "a thread enters an operation while another one is entered",
        "stale copy",
        "csrc/engine/scheduler_one_shot.cc",
        "found == sets_.end() || found->second->entered) return nullptr;",
        "found == sets_.end()) return nullptr;",
        ("cpp.test_one_shot",),
    ),
    Error(
        "a rank makes no progress while it handles a signal",
        "missing wait",
        "csrc/progress/progress.cc",
        "    waiter.away(interrupt_);\n",
        "    static_cast<void>(waiter);\n    interrupt_();\n",
        _INTERRUPTS,
    ),
    Error(
        "a forked child waits for the operations of its parent",
        "stale copy",
        _WORLD,
        "void World::wait(const Handle& handle) {\n  require_own_process();\n",
        "void World::wait(const Handle& handle) {\n",
        _FORK,
    ),
    Error(
        "a forked child ends the timeline of its parent",
        "stale copy",
        "csrc/base/trace.cc",
        "  if (file_ >= 0 && getpid() != process_) return;",
        "  //",
        _FORK,
    ),
    Error(
        "elements without memory are read at address 0",
        "wrong bucket",
        _TENSORS,
        "    if address == 0 and tensor.numel():\n",
        "    if address < 0:\n",
        _STORAGE,
    ),
    Error(
        "repeated elements without memory are read at address 0",
        "wrong bucket",
        "csrc/bindings/host_tensors.cc",
        "         (out.data || count_of(out.shape) == 0);\n",
        "         (out.data || count_of(out.shape) < 1000);\n",
        _STORAGE,
    ),
    Error(
        "negated values are sent as stored",
        "wrong weight",
        _TENSORS,
        "    return (tensor.resolve_neg() if tensor.is_neg() else tensor).contiguous()\n",
        "    return tensor.contiguous()\n",
        _STORAGE,
    ),
    Error(
        "repeated negated values are sent as stored",
        "wrong weight",
        "csrc/bindings/host_tensors.cc",
        "  return !is_true(taken(PyObject_CallOneArg(is_neg_.ptr(), tensor)));\n",
        "  return true;\n",
        _STORAGE,
    ),
    Error(
        "negated gradients are sent as stored",
        "wrong weight",
        "python/sordino/runtime/gradients/bucket.py",
        "                or grad.is_neg()\n",
        "",
        _STORAGE,
    ),
]
