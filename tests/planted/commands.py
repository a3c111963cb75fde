"""Errors in commands: their input and output, signals, limits, records, and the addresses of counters."""

from __future__ import annotations

from planted.error import Error, tests

_APP = "python/sordino/cli/app.py"
_LAUNCHER = "python/sordino/launcher/"

ERRORS = [
    Error(
        "rank 0 reads from the terminal itself, in the background",
        "lost message",
        _LAUNCHER + "guard.py",
        "                    typed.take_place_of_stdin()\n",
        "",
        (tests("terminal", "rank_0_reads"),),
    ),
    Error(
        "the end of typed input does not reach rank 0",
        "lost message",
        _LAUNCHER + "terminal.py",
        "                more = False\n                os.close(writing)\n",
        "                more = False\n",
        (tests("terminal", "end_of_input"),),
    ),
    Error(
        "a closed terminal ends a job that nohup has started",
        "lost message",
        _LAUNCHER + "processes.py",
        "if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:",
        "if signal.getsignal(signal.SIGHUP) is None:",
        (tests("terminal", "nohup"),),
    ),
    Error(
        "a job that is continued leaves its ranks stopped",
        "lost message",
        _LAUNCHER + "processes.py",
        "            send(signal.SIGCONT)\n",
        "            send(0)\n",
        (tests("terminal", "ctrl_z"),),
    ),
    Error(
        "a signal for the program ends the launcher",
        "lost message",
        _LAUNCHER + "processes.py",
        "                **dict.fromkeys(_FOR_THE_PROGRAM, self._pass_on),\n",
        "",
        (tests("terminal", "ctrl_z"),),
    ),
    Error(
        "output for a full pipe that does not block is dropped",
        "lost message",
        _LAUNCHER + "descriptors.py",
        "                writable.poll()\n",
        "                return\n",
        (tests("surroundings", "no_output_is_lost"),),
    ),
    Error(
        "the soft limit of open files limits the ranks",
        "off by one",
        _LAUNCHER + "descriptors.py",
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))\n",
        "        pass\n",
        (tests("surroundings", "soft_limit"),),
    ),
    Error(
        "the ranks inherit the launcher's own limit of open files",
        "off by one",
        _LAUNCHER + "local.py",
        "        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)\n",
        "",
        (tests("surroundings", "soft_limit"),),
    ),
    Error(
        "a closed stream crashes a command",
        "off by one",
        _APP,
        "        if getattr(sys, name) is None:\n",
        "        if number == 0:\n",
        (tests("surroundings", "caller_has_closed"),),
    ),
    Error(
        "a character that the locale lacks crashes a command",
        "lost message",
        _APP,
        'stream.reconfigure(errors="backslashreplace")',
        "stream.reconfigure()",
        (tests("surroundings", "locale"),),
    ),
    Error(
        "a separator of the program is taken away",
        "lost message",
        _APP,
        '[*options.command, "--", *command]',
        "[*options.command, *command]",
        (tests("surroundings", "separator"),),
    ),
    Error(
        "the launcher does not know that the ranks survive losses",
        "stale copy",
        "python/sordino/cli/run.py",
        "    environment |= job.exports or {}\n",
        "",
        (tests("surroundings", "hold_for_the_launcher"),),
    ),
    Error(
        "a variable overrides an option in silence",
        "lost message",
        "python/sordino/cli/run.py",
        "if exports.get(name, value) != value:",
        "if exports.get(name, value) == name:",
        (tests("surroundings", "contradict"),),
    ),
]
