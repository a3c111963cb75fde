"""Errors that a user meets first: in the launcher, plans, simulations, examples."""

from __future__ import annotations

from planted.error import Error, tests

_CLI = "python/sordino/cli/"
_PLAN = "python/sordino/plan/"
_SIMULATE = "python/sordino/simulate/"

ERRORS = [
    Error(
        "the launcher imports torch for a command that was not asked for",
        "wrong order of summation",
        _CLI + "plan.py",
        "from sordino.errors import NotBuilt, UsageError\n",
        "from sordino.errors import NotBuilt, UsageError\nfrom sordino.plan import evidence  # noqa: F401\n",
        (tests("cli", "starts_without_torch"),),
    ),
    Error(
        "asking a rank imports all that the rank has",
        "wrong order of summation",
        "python/sordino/inspection/asking.py",
        "from sordino.inspection.address import PREFIX, address_of, uid_of_peer\n",
        "from sordino.inspection.address import PREFIX\n"
        "from sordino.inspection.server import address_of, uid_of_peer\n",
        (tests("cli", "starts_without_torch"),),
    ),
    Error(
        "the process at the other end is taken for its user",
        "off by one",
        "python/sordino/inspection/address.py",
        "_CREDENTIALS.unpack(raw)[1]",
        "_CREDENTIALS.unpack(raw)[0]",
        ("tests/mp/test_inspect.py -k answers_of_a_rank",),
    ),
    Error(
        "a refusal that comes together with the end is lost",
        "lost message",
        "csrc/engine/scheduler.cc",
        "  refuse_decided();\n  std::vector<Submission> lost;\n",
        "  std::vector<Submission> lost;\n",
        ("tests/faults/test_stop_mismatches.py -k slept",),
    ),
    Error(
        "measured slowdowns do not count",
        "stale copy",
        _PLAN + "predictions.py",
        "self.compute, slower=slower)",
        "self.compute)",
        (tests("plan"),),
    ),
    Error(
        "a plan keeps the order of its predictions",
        "wrong order of summation",
        _PLAN + "predictions.py",
        "    predictions.sort(key=lambda one: one.step)\n",
        "    predictions.reverse()\n",
        (tests("plan", "a_plan_is_made"),),
    ),
    Error(
        "an algorithm with late gradients is recommended",
        "wrong order of summation",
        _PLAN + "predictions.py",
        "timely = [one for one in predictions if not one.algorithm.traits.late]",
        "timely = list(predictions)",
        (tests("plan"),),
    ),
    Error(
        "a former name of an algorithm is unknown",
        "dropped state in a checkpoint",
        "python/sordino/algorithms/registry.py",
        "    return _FORMER.get(name, name)\n",
        "    return name\n",
        (tests("former_names"),),
    ),
    Error(
        "a checkpoint with a former name is refused",
        "dropped state in a checkpoint",
        "python/sordino/torch/optimizer_state.py",
        "not in (algorithm.label, *algorithm.former_labels)",
        "!= algorithm.label",
        (tests("former_names"),),
    ),
    Error(
        "the gradients of groups are not counted",
        "lost message",
        "python/sordino/algorithms/gossip/__init__.py",
        "        if members == 1:\n            return Traffic([exchanges])\n",
        "        if members:\n            return Traffic([exchanges])\n",
        (tests("custom_algorithm"),),
    ),
    Error(
        "a word in place of a number is not refused",
        "wrong weight",
        "python/sordino/algorithms/base.py",
        "        if is_dataclass(cls):\n",
        "        if False:\n",
        (tests("algorithm_settings"),),
    ),
    Error(
        "the remaining time is inverted",
        "wrong weight",
        _SIMULATE + "command.py",
        "(1 - done) / done",
        "done / (1 - done)",
        (tests("simulate_command"),),
    ),
    Error(
        "each rank computes with all cores",
        "wrong weight",
        _CLI + "run.py",
        "capacity.this_machine().cores // job.ranks",
        "capacity.this_machine().cores",
        ("tests/mp/test_sordino_run.py -k share_the_cores",),
    ),
    Error(
        "a failed start is tried for every rank",
        "missing wait",
        "python/sordino/launcher/local.py",
        "all(self._start(number) for number in range(self._size))",
        "all([self._start(number) for number in range(self._size)])",
        ("tests/mp/test_sordino_run.py --tier all -k 'does_not_exist and local'",),
    ),
    Error(
        "an example is copied without its package files",
        "lost message",
        _CLI + "examples.py",
        "for one in (*package, module.with_suffix(",
        "for one in (module.with_suffix(",
        (tests("examples", "copied"),),
    ),
    Error(
        "an example overwrites a file",
        "lost message",
        _CLI + "examples.py",
        "    if there:\n",
        "    if len(there) > 1:\n",
        (tests("examples", "written_over"),),
    ),
    Error(
        "damaged checkpoints are not reported",
        "dropped state in a checkpoint",
        "python/sordino/checkpoint/folder.py",
        "        if steps:\n",
        "        if steps is None:\n",
        (tests("checkpoint_folder"),),
    ),
]
