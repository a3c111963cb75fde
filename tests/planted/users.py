"""Errors of what users of torch meet beside the steps: checkpoints, workers of loaders, default devices, settings."""

from __future__ import annotations

from planted.error import Error, checks, tests

_LAUNCH = "python/sordino/launch/"
_LOADERS = "tests/mp/test_data_loader_workers.py"
_ERROR = "tests/faults/test_left_in_an_error.py"
_TORCH = "python/sordino/torch/"

ERRORS = [
    Error(
        "torch's checkpoint takes a step with the others",
        "missing wait",
        _TORCH + "dcp.py",
        'return _call_by("_init_optim_state") is not None',
        "return False",
        (tests("torch_checkpoint", "take_no_step"),),
    ),
    Error(
        "torch's checkpoint is without the algorithm's state",
        "dropped state in a checkpoint",
        _TORCH + "dcp.py",
        '{**state, "param_groups": [{**groups[0], KEY: data}, *groups[1:]]}',
        "state",
        (tests("torch_checkpoint", "keep_the"),),
    ),
    Error(
        "a flattened state loses the algorithm's",
        "dropped state in a checkpoint",
        _TORCH + "dcp.py",
        '        return groups\n    return [{**groups[0], KEY: b""}, *groups[1:]]',
        "        return groups\n    return groups",
        (tests("torch_checkpoint", "keep_the"),),
    ),
    Error(
        "shards lose a flattened state",
        "dropped state in a checkpoint",
        _TORCH + "optimizer.py",
        "dcp.with_names(self._inner.state) if self._strategy.partial_state else self._inner.state",
        "self._inner.state",
        (tests("torch_checkpoint", "keep_the"),),
    ),
    Error(
        "a state by names is none for shards",
        "dropped state in a checkpoint",
        "python/sordino/algorithms/local_sgd/sharded_state.py",
        "                if key in full",
        "                if index in full",
        (tests("torch_checkpoint", "keep_the"),),
    ),
    Error(
        "algorithms load each other's states",
        "stale copy",
        _TORCH + "optimizer.py",
        "        if foreign or self._strategy.state_dict() is None:\n",
        "        if False:\n",
        (tests("torch_checkpoint", "another_algorithm"),),
    ),
    Error(
        "an empty entry of the state counts as one of before",
        "stale copy",
        "python/sordino/algorithms/local_sgd/sharded_state.py",
        "optimizer.state.pop(parameter, None), owned",
        "optimizer.state.get(parameter), owned",
        (checks("looking_at_the_state"),),
    ),
    Error(
        "a comparison of ranks is on the default device",
        "wrong bucket",
        "python/sordino/runtime/agreement.py",
        "torch.tensor([digest], device=HOST)",
        "torch.tensor([digest])",
        (tests("default_device"),),
    ),
    Error(
        "a worker of a loader joins as the rank that started it",
        "swapped rank",
        _LAUNCH + "starts.py",
        "        return os.getppid()  #",
        "        return None  #",
        (_LOADERS + " -k 'do_not_join and spawn'",),
    ),
    Error(
        "variables that a script has set make its loader's workers ranks",
        "swapped rank",
        _LAUNCH + "starts.py",
        "    if not inherited and json.dumps(mine) != environment.get(RANK_VARIABLES):\n",
        "    if not inherited:\n",
        (_LOADERS + " -k a_script_has_set",),
    ),
    Error(
        "a child that is told who it is, is no rank",
        "swapped rank",
        _LAUNCH + "starts.py",
        "inherited = mine == {",
        "inherited = mine.keys() == {",
        (_LOADERS + " -k told_who_they_are",),
    ),
    Error(
        "shutdown() in an error is a goodbye like any other",
        "lost message",
        _TORCH + "lifecycle.py",
        "isinstance(error, Exception) and context.size > 1",
        "False and context.size > 1",
        (_ERROR,),
    ),
    Error(
        "the first rank that ends is blamed",
        "swapped rank",
        "python/sordino/cli/outcomes.py",
        "if outcome.rank == self._first_failure), None)",
        "if outcome.rank == -1), None)",
        (_ERROR,),
    ),
    Error(
        "errors are in the order of the folder",
        "wrong order of summation",
        "python/sordino/cli/outcomes.py",
        "sorted(new, key=lambda one: one.lstat().st_mtime_ns)",
        "sorted(new)",
        (_ERROR + " -k the_order_of_errors",),
    ),
    Error(
        "a wrapper's name is a block",
        "wrong bucket",
        "python/sordino/runtime/segments.py",
        'for part in name.split(".")[:-1] if part not in _WRAPPERS)',
        'for part in name.split(".")[:-1])',
        (tests("segments"),),
    ),
    Error(
        "blocks are sought at the top of the model only",
        "wrong bucket",
        "python/sordino/runtime/segments.py",
        "    for place, part in enumerate(path):\n        if not part.isdigit():\n",
        "    for place, part in enumerate(path[:2]):\n        if not part.isdigit():\n",
        (tests("segments"),),
    ),
    Error(
        "a model without blocks is one segment",
        "wrong bucket",
        "python/sordino/runtime/segments.py",
        "    if max(numbers, default=0) >= _FEW:\n",
        "    if True:\n",
        (tests("segments"),),
    ),
]
