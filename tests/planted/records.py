"""Errors of the run record: the record itself, its page, and the server of the page."""

from __future__ import annotations

from planted.error import Error, tests

_RECORDER = "python/sordino/runtime/recorder.py"
_PAGE = "python/sordino/report/page/"

ERRORS = [
    Error(
        "bytes are those of another counter",
        "swapped rank",
        _RECORDER,
        "for name, count in zip(names, counts):",
        "for name, count in zip(names[1:] + names[:1], counts):",
        (tests("report", "links"),),
    ),
    Error(
        "a wait counts in its step and in the next",
        "stale copy",
        _RECORDER,
        "self._since, self._last = now, (exposed, busy, sent)",
        "self._since, self._last = now, (before_exposed, busy, sent)",
        (tests("report", "besides"),),
    ),
    Error(
        "an evaluation counts for the step after it",
        "wrong bucket",
        _RECORDER,
        "        self._count(self._besides)\n        self._besides.times += 1\n",
        "        self._count(self._open)\n        self._besides.times += 1\n",
        (tests("report", "besides"),),
    ),
    Error(
        "operations in a step do not count for the step",
        "wrong bucket",
        _RECORDER,
        "last.register_post_accumulate_grad_hook(lambda _: begun.set())",
        "last.register_post_accumulate_grad_hook(lambda _: None)",
        (tests("report", "evaluation"),),
    ),
    Error(
        "bytes after the last step are not recorded",
        "lost message",
        _RECORDER,
        "        self._count(self._besides)  # also of",
        "        # also of",
        (tests("report", "unfinished"),),
    ),
    Error(
        "an incomplete line counts as a line",
        "off by one",
        "python/sordino/record/reading.py",
        '*lines, self.rest = (self.rest + data).split(b"\\n")',
        'lines = (self.rest + data).split(b"\\n")',
        (tests("report", "torn or gains"),),
    ),
    Error(
        "a torn line ends the report",
        "lost message",
        "python/sordino/record/reading.py",
        "        except (ValueError, KeyError, TypeError):",
        "        except (KeyError, TypeError):",
        (tests("report", "torn"),),
    ),
    Error(
        "repeated steps count twice",
        "forgotten rollback",
        _PAGE + "series.py",
        "for later in starts if later > line",
        "for later in starts if later > line.get('end', later) > line",
        (tests("report", "again"),),
    ),
    Error(
        "bytes of a simulated worker after its last step are lost",
        "lost message",
        "python/sordino/simulate/recording.py",
        "        points[-1] = record.sums(points[-1].time)",
        "        pass",
        (tests("report", "simulations"),),
    ),
    Error(
        "any request at the port is answered",
        "lost message",
        _PAGE + "live.py",
        "        if not known or not self.server.is_meant(",
        "        if not self.server.is_meant(",
        (tests("report", "answered"),),
    ),
    Error(
        "a run's name may end the page's data",
        "lost message",
        _PAGE + "build.py",
        'return text.replace("<", "\\\\u003c").replace(',
        "return text.replace(",
        (tests("report", "names"),),
    ),
    Error(
        "the steps of a rank that joins are counted from 0",
        "off by one",
        _RECORDER,
        "self.steps = self._after = steps",
        "self._after = steps",
        ("tests/faults/test_join.py --tier all -k 'lost_rank_is_replaced and local'",),
    ),
    Error(
        "the record of a rank that joins begins before it has joined",
        "stale copy",
        _RECORDER,
        "self._joined = context.newcomer is None",
        "self._joined = True",
        ("tests/faults/test_join.py --tier all -k 'lost_rank_is_replaced and local'",),
    ),
    Error(
        "the step of a checkpoint counts as repeated",
        "off by one",
        _PAGE + "series.py",
        'line["step"] + 1 if line.get("values") == {} else line["step"]',
        'line["step"]',
        (tests("report", "repeated"),),
    ),
]
