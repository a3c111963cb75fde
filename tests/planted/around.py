"""Errors of what is around training: elastic states, checkpoints, decisions, the simulator and the tuner."""

from __future__ import annotations

from planted.error import Error, tests

_ELASTIC = "python/sordino/torch/elastic/"
_CHECKPOINT = "python/sordino/checkpoint/"
_ALGORITHMS = "python/sordino/algorithms/"
_SIMULATE = "python/sordino/simulate/"
_TUNE = "python/sordino/tune/"

ERRORS = [
    # ---- elastic
    Error(
        "every epoch has the order of the first",
        "stale copy",
        _ELASTIC + "sampler.py",
        "manual_seed(self.seed + epoch)",
        "manual_seed(self.seed)",
        (tests("elastic_sampler"),),
    ),
    Error(
        "a sampler saves what was processed before the division",
        "dropped state in a checkpoint",
        _ELASTIC + "sampler.py",
        '"processed_indices": self._processed().nonzero().flatten()}',
        '"processed_indices": self._division.done.nonzero().flatten()}',
        (tests("elastic_sampler"),),
    ),
    Error(
        "a restored tensor is the snapshot's own",
        "stale copy",
        _ELASTIC + "snapshot.py",
        "return tensor.clone() if own_tensors else tensor",
        "return tensor",
        (tests("elastic_states"),),
    ),
    Error(
        "samplers do not go back",
        "forgotten rollback",
        _ELASTIC + "parts.py",
        "        self._sampler.revert(self._memento)",
        "        pass",
        (tests("elastic_states") + " tests/python/test_elastic_sampler.py tests/python/test_elastic.py",),
    ),
    Error(
        "a commit that others have saved is dropped",
        "forgotten rollback",
        _ELASTIC + "state.py",
        "        if self._stopped and self._version < max(one.version for one in told):\n            self.save()\n",
        "",
        (tests("elastic_commits"),),
    ),
    Error(
        "a fault is taken for a change of hosts",
        "forgotten rollback",
        _ELASTIC + "run.py",
        "state.rejoin(undo=isinstance(cause, SordinoError))",
        "state.rejoin(undo=False)",
        (tests("elastic"),),
    ),
    # ---- checkpoints
    Error(
        "checksums are not looked at",
        "stale copy",
        _CHECKPOINT + "files.py",
        "damaged = archive.testzip()",
        "damaged = None",
        (tests("checkpoint"),),
    ),
    Error(
        "one checkpoint too many stays",
        "off by one",
        _CHECKPOINT + "folder.py",
        "[-self.keep :]",
        "[-self.keep - 1 :]",
        (tests("checkpoint_folder"),),
    ),
    Error(
        "the oldest checkpoint is taken for the newest",
        "stale copy",
        _CHECKPOINT + "folder.py",
        "sorted(self.steps(), reverse=True)",
        "sorted(self.steps())",
        (tests("checkpoint_folder"),),
    ),
    Error(
        "each tensor is cut as if it were the first",
        "wrong bucket",
        _CHECKPOINT + "pieces.py",
        "        passed += tensor.numel()\n",
        "",
        (tests("checkpoint_folder"),),
    ),
    Error(
        "what no shard has is left as it comes",
        "dropped state in a checkpoint",
        _CHECKPOINT + "pieces.py",
        "    if filled != total:",
        "    if filled > total:",
        (tests("checkpoint_folder"),),
    ),
    # ---- decisions
    Error(
        "an estimate is the sum of two",
        "wrong weight",
        _ALGORITHMS + "pull_schedule.py",
        "return (estimate + measured) / 2",
        "return estimate + measured",
        (tests("pull_schedule"),),
    ),
    Error(
        "who has failed is asked again",
        "stale copy",
        _ALGORITHMS + "pull_schedule.py",
        '        self._others.discard(peer)\n        return [Tell(peer, ("there?",)),',
        '        return [Tell(peer, ("there?",)),',
        (tests("pull_schedule"),),
    ),
    Error(
        "pulls begin when they should end",
        "off by one",
        _ALGORITHMS + "pull_manager.py",
        "return j, end - takes",
        "return j, end",
        (tests("pull_schedule") + " tests/python/test_pulls_together.py",),
    ),
    Error(
        "a node is given to two",
        "swapped rank",
        _ALGORITHMS + "pull_manager.py",
        "        self._content.discard(j)\n        self._pulls[i]",
        "        self._pulls[i]",
        (tests("pull_schedule") + " tests/python/test_pulls_together.py",),
    ),
    Error(
        "numbers of averagings collide",
        "wrong bucket",
        _ALGORITHMS + "pairing.py",
        "self._number += self._size",
        "self._number += 1",
        (tests("pairing"),),
    ),
    Error(
        "an averaging of another counts as one's own",
        "lost message",
        _ALGORITHMS + "pairing.py",
        "self._mine = self._mine and sender == self._peer",
        "self._mine = True",
        (tests("pairing"),),
    ),
    Error(
        "the smallest tensors are placed first",
        "wrong bucket",
        _ALGORITHMS + "skipping.py",
        "key=lambda index: (-sizes[index], index)",
        "key=lambda index: (sizes[index], index)",
        (tests("skipping"),),
    ),
    Error(
        "the threshold falls beyond its bound",
        "off by one",
        _ALGORITHMS + "skipping.py",
        "max(threshold - self.step, self.lower)",
        "max(threshold, self.lower) - self.step",
        (tests("skipping"),),
    ),
    # ---- the simulator
    Error(
        "a pair swaps instead of averaging",
        "wrong weight",
        _SIMULATE + "averaging.py",
        "alpha=0.5)",
        "alpha=1.0)",
        (tests("simulate"),),
    ),
    Error(
        "bytes are bits",
        "wrong weight",
        _SIMULATE + "links.py",
        "return exact(self.latency + 8e-9 * count",
        "return exact(self.latency + 1e-9 * count",
        (tests("simulate"),),
    ),
    Error(
        "weights of push-sum travel for nothing",
        "lost message",
        _SIMULATE + "traffic.py",
        "self.bytes = [count + _WEIGHT for count in self.bytes]",
        "self.bytes = [count for count in self.bytes]",
        (tests("simulate_traffic"),),
    ),
    Error(
        "late gradients are used at once",
        "stale copy",
        _SIMULATE + "vectorized.py",
        "used = self._before if self._late else mean",
        "used = mean",
        (tests("simulate_lockstep"),),
    ),
    # ---- the tuner
    Error(
        "a ring sends all to all",
        "wrong weight",
        _TUNE + "costs.py",
        "2 * (len(ranks) - 1) / len(ranks) * count)",
        "2 * (len(ranks) - 1) * count)",
        (tests("tune"),),
    ),
    Error(
        "what a node needs travels to each of its ranks",
        "wrong bucket",
        _TUNE + "costs.py",
        "travels.setdefault((ranks[source], self.nodes[rank]), rank)",
        "travels.setdefault((ranks[source], rank), rank)",
        (tests("tune"), "tests/python/test_sim_checks.py -k tune"),
    ),
    Error(
        "a negative latency stays",
        "off by one",
        _TUNE + "links.py",
        "    if alpha < 0:",
        "    if alpha > 1:",
        (tests("tune"),),
    ),
]
