"""Errors in the growth of a job: processes that join while it runs."""

from __future__ import annotations

from planted.error import Error

_GROWTH = "python/sordino/runtime/recovery/growth.py"
_STATE = "python/sordino/torch/elastic/state.py"
_JOIN = "tests/faults/test_join.py --tier all -k "
_DOOR = "tests/python/rendezvous/test_door.py"

ERRORS = [
    Error(
        "a vote succeeds although a rank has not agreed",
        "wrong weight",
        "python/sordino/rendezvous/votes.py",
        "        elif vote.decided is None:\n            vote.decided = False\n",
        "        else:\n            vote.agreed.add(rank)\n",
        ("tests/python/rendezvous/test_votes.py",),
    ),
    Error(
        "a vote waits for a rank that has ended",
        "missing wait",
        "python/sordino/rendezvous/votes.py",
        "            elif missing & gone:\n                vote.decided = False\n",
        "",
        ("tests/python/rendezvous/test_votes.py",),
    ),
    Error(
        "an answer that comes late is taken for another one",
        "swapped rank",
        "python/sordino/rendezvous/sockets.py",
        '                if found[0].get("n") == request:\n',
        "                if True:\n",
        ("tests/python/rendezvous/test_door.py",),
    ),
    Error(
        "a rank that has given up a round still counts in it",
        "forgotten rollback",
        "python/sordino/rendezvous/desk.py",
        "            shown.pop(visitor.rank, None)\n",
        "",
        ("tests/python/rendezvous/test_door.py",),
    ),
    Error(
        "a recovery takes the mean with a model that has just joined",
        "wrong weight",
        "python/sordino/algorithms/exchanging.py",
        "if self.levels and self.context.losses.levels:",
        "if self.levels:",
        (_JOIN + "before_a_newcomer_has_the_state",),
    ),
    Error(
        "what a job of one rank has processed is forgotten when another joins",
        "dropped state in a checkpoint",
        _STATE,
        "            if under_way and one.version == 0:\n                continue\n",
        "",
        (_JOIN + "every_sample",),
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
        "python/sordino/rendezvous/desk.py",
        "            self._door.close()\n",
        "            self._door.waiting.clear()\n",
        (_DOOR,),
    ),
    Error(
        "a newcomer that has ended still waits at the door",
        "lost message",
        "python/sordino/rendezvous/desk.py",
        "        self._door.left(rank)\n",
        "",
        (_DOOR,),
    ),
    Error(
        "the number of a newcomer is given twice",
        "swapped rank",
        "python/sordino/rendezvous/desk.py",
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
