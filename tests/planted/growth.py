"""Errors in the growth of a job: processes that join while it runs."""

from __future__ import annotations

from planted.error import Error

_GROWTH = "python/sordino/runtime/recovery/growth.py"
_JOIN = "tests/faults/test_join.py --tier all -k "
_DOOR = "tests/python/rendezvous/test_door.py"

ERRORS = [
    Error(
        "ranks take a world for formed although a newcomer did not come",
        "lost message",
        _GROWTH,
        'failures = [one for one in gather_by_core(context, failure, "formed") if one]',
        'failures = [one for one in gather_by_core(context, failure, "formed") if one][1:][:0]',
        (_JOIN + "newcomer_is_lost_while_it_joins",),
    ),
    Error(
        "a newcomer with another model is let in",
        "lost message",
        _GROWTH,
        'return f"the job has {ours}, and the newcomer {its}" if ours != its else ""',
        'return ""',
        (_JOIN + "another_model",),
    ),
    Error(
        "a newcomer knocks no more after a failed meeting",
        "forgotten rollback",
        _GROWTH,
        '            if world is not None:\n                world.shutdown("")\n            continue\n',
        "            raise\n",
        (_JOIN + "lost_while",),
    ),
    Error(
        "ranks that join are not made known to the optimizers",
        "lost message",
        _GROWTH,
        "            one.after_growth()\n",
        "            pass\n",
        (_JOIN + "replaced",),
    ),
    Error(
        "gossip goes on from different models when a rank joins",
        "wrong weight",
        "python/sordino/algorithms/exchanging.py",
        "        super().prepare_growth(optimizer)\n",
        "        super().prepare_growth(optimizer)\n        return\n",
        (_JOIN + "each_algorithm",),
    ),
    Error(
        "ranks keep counting operations when others join",
        "swapped rank",
        "python/sordino/runtime/context.py",
        "        self.names.begin_anew()\n",
        "",
        (_JOIN + "replaced",),
    ),
    Error(
        "identities of ranks that joined are their ranks",
        "swapped rank",
        "python/sordino/runtime/context.py",
        "self.identities = [self._founders[rank] for rank in self.world.identities]",
        "self.identities = list(self.world.identities)",
        (_JOIN + "replaced",),
    ),
    Error(
        "a process that has not joined trains alone",
        "lost message",
        "python/sordino/torch/optimizer.py",
        "        if context.newcomer is not None:\n",
        "        if context.newcomer is not None and context.size > 1:\n",
        (_JOIN + "train_alone",),
    ),
    Error(
        "a replaced rank still counts as failed",
        "forgotten rollback",
        "python/sordino/launcher/outcomes.py",
        "all(one.code < 0 or one.rank in self._replaced for one in failed)",
        "all(one.code < 0 for one in failed)",
        (_JOIN + "another_model",),
    ),
    Error(
        "newcomers are not told that the job is over",
        "lost message",
        "python/sordino/rendezvous/sockets.py",
        "            self._door.close()\n",
        "            self._door.waiting.clear()\n",
        (_DOOR,),
    ),
    Error(
        "a newcomer that has ended still waits at the door",
        "lost message",
        "python/sordino/rendezvous/sockets.py",
        "        self._door.left(rank)\n",
        "",
        (_DOOR,),
    ),
    Error(
        "the number of a newcomer is given twice",
        "swapped rank",
        "python/sordino/rendezvous/sockets.py",
        "        self._next += 1\n        return self._next - 1\n",
        "        return self._next\n",
        (_DOOR,),
    ),
    Error(
        "the last rank leaves, and nothing of the job remains",
        "forgotten rollback",
        _GROWTH,
        "    if len(leavers) == context.size:\n        leavers = []\n",
        "",
        (_JOIN + "all_want_to_leave",),
    ),
    Error(
        "a rank that has left counts as finished",
        "wrong weight",
        "python/sordino/launcher/outcomes.py",
        'one.code == 0 and one.rank not in self._notices["departs"]',
        "one.code == 0",
        (_JOIN + "lost_after_another_has_left",),
    ),
]
