"""Contents of the page for one run, as JSON: data for every section, or one sentence why it is empty."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from sordino.errors import Unreadable
from sordino.record.reading import Line, Rank, Reader, Run
from sordino.report.page import series, waits

_NO_METRICS = "Nothing was recorded: call hvd.record(loss=loss) in the training loop."
_CHANGES = {"with": "joined", "without": "left"}  # of ranks, by the keys of a line "growth"
_ALONE = "A single rank does not communicate."
_NO_AGES = (
    "No ages were recorded: in training only scheduled-pull records them, in simulations gossip and the asynchronous "
    "algorithms."
)
_NO_SKIPS = "Only caps records skipped tensors."
_NO_STEPS = "No step has been recorded yet."
_PLANNED = "A plan trains nothing."


def contents(reader: Reader) -> dict[str, Any]:
    """Return the data to show for a run.

    Raises:
        Unreadable: a line is JSON but not a line of a record.
    """
    try:
        return _contents(reader)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise Unreadable(f"{reader.folder}: a line of its files does not belong to a record ({what})") from error


def _contents(reader: Reader) -> dict[str, Any]:
    run = reader.run
    zero = _begin(run)
    parts: dict[str, Any] = {
        "metrics": series.metrics(run, zero),
        "steps": series.steps(run, zero),
        "links": series.links(run),
        "ages": series.ages(run, zero),
        "skips": series.skips(run),
        "windows": waits.windows(run, zero),
        "waits": waits.matrix(run),
    }
    return {
        "name": run.name,
        "what": run.what,
        "virtual": run.head.get("clock") == "virtual",
        "facts": _facts(run, zero),
        "summary": _summary(run, parts),
        "ranks": [_rank(rank, run, zero) for _, rank in sorted(run.ranks.items())],
        **parts,
        "events": _events(run, zero),
        "result": (run.job.get("result") or [{"found": None}])[-1]["found"],
        "missing": _missing(run, parts),
        "notes": _notes(reader),
    }


def _begin(run: Run) -> float:
    if run.head.get("clock") == "virtual":
        return 0.0
    times = [line["time"] for kind in ("job", "start") for line in run.job.get(kind, [])]
    times += [line["time"] for rank in run.ranks.values() for line in rank.of("rank")]
    return min(times, default=0.0)


def _algorithm(run: Run) -> str:
    wrapped = [line for rank in run.ranks.values() for line in rank.of("optimizer")]
    return str(wrapped[-1]["settings"]) if wrapped else str(run.head.get("algorithm", ""))


def _facts(run: Run, zero: float) -> list[list[str]]:
    """Return facts about a run, as pairs of name and text."""
    facts: list[list[str]] = []
    if _algorithm(run):
        facts.append(["Algorithm", _algorithm(run)])
    sizes = [line["size"] for rank in run.ranks.values() for line in rank.of("rank") if "size" in line]
    hosts = sorted({line["host"] for rank in run.ranks.values() for line in rank.of("rank") if "host" in line})
    if sizes:
        facts.append(["Ranks", f"{sizes[0]} on {', '.join(hosts)}" if hosts else str(sizes[0])])
    wrapped = [line for rank in run.ranks.values() for line in rank.of("optimizer")]
    if wrapped:
        facts.append(["Model", f"{wrapped[-1]['parameters']:,} parameters, {wrapped[-1]['optimizer']}"])
    by = sorted({line["transport"] for rank in run.ranks.values() for line in rank.of("rank") if "transport" in line})
    if by:
        facts.append(["Transport", ", ".join(by)])
    if run.head.get("command"):
        facts.append(["Command", shlex.join(run.head["command"])])
    facts += [[str(name), str(value)] for name, value in run.head.get("setting", {}).items()]
    if zero > 0:
        facts.append(["Begun", datetime.fromtimestamp(zero, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")])
    version = run.head.get("version") or next(
        (line.get("version") for rank in run.ranks.values() for line in rank.of("rank")), ""
    )
    if version:
        facts.append(["Sordino", str(version)])
    return facts


def _summary(run: Run, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the values by which runs are compared: means per step and rank, and means of a rank's whole run."""
    lines = [line for rank in run.ranks.values() for line in series.kept(rank, "step")]
    besides = [line for rank in run.ranks.values() for line in rank.of("besides")]
    ranks = max(len(run.ranks), 1)
    count = sum(line["steps"] for line in lines)
    exposed = sum(line["exposed"] for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    sent = sum(map(_sent, lines))
    hidden = None if any(line["busy"] is None for line in lines) else sum(map(series.hidden_of, lines))
    return {
        "algorithm": _algorithm(run),
        "ranks": len(run.ranks),
        "steps": max((line["step"] for line in lines), default=0),
        "step": seconds / count if count else None,
        "exposed": exposed / count if count else None,
        "hidden": hidden / count if count and hidden is not None else None,
        "bytes": sent / count if count else None,
        "whole": {"seconds": seconds / ranks, "exposed": exposed / ranks, "bytes": sent / ranks},
        "besides": {
            "seconds": sum(line["seconds"] for line in besides) / ranks,
            "exposed": sum(line["exposed"] for line in besides) / ranks,
            "bytes": sum(map(_sent, besides)) / ranks,
        },
        "age": _age(run),
        "metrics": {
            name: {"last": curve["mean"][-1], "least": min(curve["mean"]), "most": max(curve["mean"])}
            for name, curve in parts["metrics"].items()
        },
        "lost": sum(1 for rank in run.ranks.values() if _fate(rank, run)[0] not in ("finished", "running")),
        "restarts": max(0, len(run.job.get("start", [])) - 1),
    }


def _sent(line: Line) -> float:
    """Return the bytes of a line, summed over receivers."""
    return float(sum(line["sent"].values()))


def _age(run: Run) -> float | None:
    """Return the mean age of averaged models. Lines of a simulation hold means, which are weighted by their counts."""
    lines = [line for rank in run.ranks.values() for line in rank.of("ages")]
    ages = [(pull[0], line.get("count", 1)) for line in lines for pull in line["pulls"] if pull[0] is not None]
    count = sum(weight for _, weight in ages)
    return sum(age * weight for age, weight in ages) / count if count else None


def _fate(rank: Rank, run: Run) -> tuple[str, str]:
    """Return the fate of a rank, as one word and as a sentence."""
    if rank.last == "end":
        return "finished", "It shut down."
    if rank.last == "error":
        return "failed", rank.of("error")[-1]["text"]
    ended = len(run.job.get("end", [])) >= len(run.job.get("start", [])) > 0
    left_out = any(rank.rank in line["lost"] for other in run.ranks.values() for line in other.of("recovery"))
    if left_out:
        return "lost", "The others continued without it."
    if ended:
        return "killed", "It ended without a last line: it was killed, or it crashed."
    return "running", "Its record has no last line: it is still training, or it was killed."


def _rank(rank: Rank, run: Run, zero: float) -> dict[str, Any]:
    fate, text = _fate(rank, run)
    lines = series.kept(rank, "step")
    line = rank.of("rank")[-1] if rank.of("rank") else {}
    return {
        "rank": rank.rank,
        "host": line.get("host", ""),
        "node": line.get("node", 0),
        "steps": lines[-1]["step"] if lines else 0,
        "exposed": sum(line["exposed"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
        "bytes": sum(map(_sent, lines)),
        "besides": sum(map(_sent, rank.of("besides"))),
        "fate": fate,
        "text": text,
    }


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _events(run: Run, zero: float) -> list[dict[str, Any]]:
    """Return the events of the run in the order of time."""
    found: list[dict[str, Any]] = []

    def add(line: Line, who: str, what: str, text: str) -> None:
        found.append({"time": line["time"] - zero, "who": who, "what": what, "text": text})

    for line in run.job.get("start", []):
        if line["number"] > 0:
            add(line, "job", "restart", f"All ranks were restarted: restart {line['number']}.")
    for line in run.job.get("end", []):
        why = line.get("why") or ("all ranks finished" if line["status"] == 0 else f"status {line['status']}")
        add(line, "job", "end" if line["status"] == 0 else "failure", f"The job ended: {why}.")
    for number, rank in sorted(run.ranks.items()):
        who = f"rank {number}"
        for line in rank.of("recovery"):
            lost = f"without {', '.join(map(str, line['lost']))}" if line["lost"] else "with the same ranks"
            add(
                line, who, "recovery",
                f"Continued {lost} in epoch {line['epoch']}, {line['size']} ranks, "
                f"after {line['seconds']:.3f} s. {line['why']}",
            )  # fmt: skip
        for line in rank.of("growth"):
            text = " and ".join(f"{how} {_named(line[key])}" for how, key in _CHANGES.items() if line[key])
            text = f"Continued {text} in epoch {line['epoch']}, {line['size']} ranks"
            add(line, who, "joined", f"{text}, after {line['seconds']:.3f} s.")
        for line in rank.of("error"):
            add(line, who, "failure", line["text"])
        for line in rank.of("fault"):
            add(line, who, "failure", line["text"])
        for line in rank.of("rank")[1:]:
            add(line, who, "joined", f"Started again, with {line.get('size', '?')} ranks.")
    return sorted(found, key=lambda event: float(event["time"]))


def _missing(run: Run, parts: dict[str, Any]) -> dict[str, str]:
    """Return the reason why a section is empty, by its name."""
    if run.what == "plan":
        return dict.fromkeys(("metrics", "steps", "links", "ages", "skips", "waits"), _PLANNED)
    alone = len(run.ranks) <= 1
    reasons = {
        "metrics": ("" if parts["metrics"] else _NO_METRICS),
        "steps": ("" if parts["steps"]["step"] else _NO_STEPS),
        "links": _ALONE if alone else ("" if any(map(sum, parts["links"]["bytes"])) else "Nothing was sent."),
        "ages": ("" if parts["ages"]["step"] else _NO_AGES),
        "skips": ("" if parts["skips"] else _NO_SKIPS),
        "waits": ("" if parts["windows"] else "No spans were recorded." if not alone else _ALONE),
    }
    return {name: text for name, text in reasons.items() if text}


def _notes(reader: Reader) -> list[str]:
    """Return notes on the record itself."""
    run = reader.run
    notes = [
        f"{name}: {count} incomplete {'line was' if count == 1 else 'lines were'} skipped; a rank was killed while it "
        "wrote, or the disk was full."
        for name, count in sorted(run.torn.items())
    ]
    notes += [f"{name}: the last line is incomplete; it was skipped." for name in sorted(reader.unfinished())]
    numbers = [line["size"] for rank in run.ranks.values() for line in rank.of("rank") if "size" in line]
    if run.what == "training" and numbers and len(run.ranks) < max(numbers):
        notes.append(
            f"The files of {max(numbers) - len(run.ranks)} of {max(numbers)} ranks are missing: copy the folders of "
            "all hosts into one."
        )
    if run.what == "simulation" and numbers and len(run.ranks) < max(numbers):
        notes.append(f"The first {len(run.ranks)} of {max(numbers)} workers are shown.")
    again = [line for rank in run.ranks.values() for line in rank.of("step") if line["start"] > 0]
    if again:
        notes.append("Steps that were repeated after a restart are shown as in their last repetition.")
    return notes
