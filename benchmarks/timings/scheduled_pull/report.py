"""Tables and plots of the parts of scheduled_pull.py."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_quartiles, format_seconds, table

_CONTESTANTS = {
    "alone": "no communication",
    "none": "no overlap",
    "naive": "naive overlap",
    "manager": "scheduled, manager",
    "autonomous": "scheduled, autonomous",
    "local_sgd": "LocalSGD, all-reduce",
    "crossover": "Crossover",
}
GETS = ("get", "get_calls", "get_allocated", "get_beside")
_SERVING = {
    "alone": "alone",
    "neighbour": "the other rank copies",
    "pulled": "pulled from",
    "publishing": "publishing",
    "publishing_pulled": "publishing, pulled from",
}
_WAYS = {
    "snapshot": "snapshot",
    "get": "MPI_Get",
    "get_calls": "MPI_Get, MPI_Iprobe every ms",
    "get_allocated": "MPI_Get, allocated window",
    "get_beside": "MPI_Get with Sordino initialized",
    "nobody": "no gets",
}
_COLOURS = {
    "alone": "#888888",
    "none": "#c8553d",
    "naive": "#e0a458",
    "manager": "#0b6e4f",
    "autonomous": "#5fb49c",
    "local_sgd": "#3d5a80",
    "crossover": "#98c1d9",
}


# ---- pulls ---------------------------------------------------------------------------------------------------------


def pulls(results: Results) -> str:
    """Return steps, waiting, ages and messages by the number of wide links as Markdown."""
    settings, mbps = results["settings"], results["mbps"]
    interval, compute = settings["interval"], settings["compute-ms"]
    what = (
        f"One rank on each of {results['rows'][0]['hosts']} emulated hosts with links of {mbps['wide'] / 1e3:g} Gbps "
        f"(wide) or {mbps['narrow'] / 1e3:g} Gbps; a model of {format_bytes(settings['model-bytes'])}; {interval} "
        f"steps per window. Each step sleeps for {compute:g} ms, so that the machine's cores do not decide. "
        f"{settings['rounds']} turns of {settings['windows']} windows after {settings['warm-up']} of warm-up; "
        "contestants take turns. Median and quartiles are over the turns for steps and waiting (mean over the ranks), "
        "and over all pulls for ages. Age: time from the publication of a pulled model to its averaging. Pull: "
        "duration of the pull, a lower bound of the age. Beyond: their difference. Behind: steps of the puller less "
        "steps of the peer at publication. Messages: per window and rank."
    )
    blocks = verdicts.head(results, "Pulls over links that differ", what, labels=_CONTESTANTS)
    for row in results["rows"]:
        steps, ages = [], []
        for name, one in row["contestants"].items():
            waited = "–" if name == "alone" else format_quartiles(one["waited"])
            over, sent = f"{one['over_alone']['median']:.3f}×", f"{one['bytes']['median'] / 1e6:.3g} MB"
            steps.append([_CONTESTANTS[name], format_quartiles(one["step"]), over, waited, sent])
            if "age" in one:
                behind = f"{one['behind']['mean']:+.1f} ± {one['behind']['deviation']:.1f}"
                parts = [
                    format_quartiles(one["age"]),
                    *(format_seconds(one[key]["median"]) for key in ("pull", "beyond")),
                ]
                counts = [f"{one[key]:.3g}" for key in ("messages", "failed", "unpublished")]
                ages.append([_CONTESTANTS[name], *parts, behind, *counts])
        blocks += [
            f"## {row['wide']} of {row['hosts']} links wide",
            table(["", "A step", "Over alone", "Waited a window", "Sent a window"], steps),
            table(["", "Age", "Pull", "Beyond", "Behind, steps", "Messages", "Failed", "Unpublished"], ages),
        ]
    return "\n\n".join(blocks)


def draw_pulls(results: Results, figure: Any) -> None:
    """Draw waiting, and ages over the durations of pulls, by the number of wide links."""
    left, right = figure.subplots(1, 2)
    rows = results["rows"]
    names = [name for name in rows[0]["contestants"] if name != "alone"]
    for k, name in enumerate(names):
        places = [place + (k - len(names) / 2) * 0.13 for place in range(len(rows))]
        waited = [1e3 * row["contestants"][name]["waited"]["median"] for row in rows]
        left.bar(places, waited, 0.12, color=_COLOURS[name], label=_CONTESTANTS[name])
        if "age" not in rows[0]["contestants"][name]:
            continue
        for key, look in (("age", {"alpha": 0.5}), ("pull", {})):
            values = [1e3 * row["contestants"][name][key]["median"] for row in rows]
            label = f"{_CONTESTANTS[name]}: {key}"
            right.bar(places, values, 0.12, color=_COLOURS[name], label=label, **look)
    for axes, what in ((left, "waited a window, ms"), (right, "age of the pulled model, ms")):
        axes.set_xticks(range(len(rows)), [f"{row['wide']} of {row['hosts']} wide" for row in rows])
        axes.set_ylabel(what)
        axes.legend(fontsize=6)


def where(row: Results) -> str:
    """Describe the machine or the link of a row."""
    return "on one machine" if row["mbps"] is None else f"between hosts, {row['mbps'] / 1e3:g} Gbps"


# ---- serving -------------------------------------------------------------------------------------------------------


def serving(results: Results) -> str:
    """Return step times and their ratios, and times of snapshots and copies, as Markdown."""
    settings = results["settings"]
    what = (
        f"One rank computes, about {settings['step-ms']:g} ms per step on one core; another rank pulls its snapshots "
        f"continuously. {settings['rounds']} turns of {settings['steps']} steps of each way. Ratios are of the turns' "
        'medians: median (and quartiles) over the rounds. "The other rank copies" disturbs by its use of memory alone.'
    )
    blocks = verdicts.head(results, "Cost of serving pulls", what)
    for row in results["rows"]:
        lines = []
        for name, one in row["ways"].items():
            taken = one["times_a_second"] * row["bytes"] / 1e9 if name not in ("alone", "publishing") else 0.0
            told = f"{taken:.2f} GB/s" if taken else "–"
            lines.append([_SERVING[name], format_quartiles(one["step"]), told, str(one["unpublished"])])
        ratios = []
        for pair, one in row["ratios"].items():
            over, under = (_SERVING[name] for name in pair.split(" / "))
            ratios.append([f"{over}, over {under}", f"{one['median']:.3f}× ({one['q1']:.3f} to {one['q3']:.3f})"])
        blocks += [
            f"## {format_bytes(row['bytes'])}, {where(row)}",
            table(["", "A step", "Pulled, or copied", "Unpublished so far"], lines),
            table(["", "Ratio"], ratios),
        ]
        if row["mbps"] is None:
            times = ", ".join(f"{name} {format_quartiles(one)}" for name, one in row["publication"].items())
            blocks.append(f"A snapshot and copies of as many bytes, without pulls: {times}.")
    return "\n\n".join(blocks)


def draw_serving(results: Results, figure: Any) -> None:
    """Draw ratios by place and size."""
    axes = figure.subplots()
    rows = results["rows"]
    pairs = list(rows[0]["ratios"])
    for k, pair in enumerate(pairs):
        places = [place + (k - len(pairs) / 2) * 0.18 for place in range(len(rows))]
        label = ", over ".join(_SERVING[name] for name in pair.split(" / "))
        axes.bar(places, [row["ratios"][pair]["median"] for row in rows], 0.17, label=label)
    axes.axhline(1, color="black", lw=0.8)
    names = [f"{format_bytes(row['bytes'])}\n{where(row)}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=6)
    axes.set_ylabel("ratio of step times")
    axes.legend(fontsize=7)


# ---- one_sided -----------------------------------------------------------------------------------------------------


def one_sided(results: Results) -> str:
    """Return times, late turns, ratios and the computation of the other rank as Markdown."""
    turn = results["settings"]["turn-ms"]
    what = (
        f"Rank 1 computes for {turn:g} ms in a turn. Meanwhile rank 0 gets its bytes again and again. "
        f"{results['settings']['rounds']} turns of each way, in turn in one run. Late: turns in which the first Get "
        "lasted until rank 1 had finished computing and called MPI again. Its time is then set by this benchmark: it "
        "is the time of a step without an MPI call. Computed: work of rank 1 over its work without gets."
    )
    blocks = verdicts.head(results, "Bytes of another rank: request and reply, or MPI_Get", what)
    for row in results["rows"]:
        lines = []
        undisturbed = row["ways"]["nobody"]["computed"]["median"]
        for name, label in _WAYS.items():
            one = row["ways"].get(name)
            if one is None or "seconds" not in one:
                continue
            ratio = f"{row['ratios'][name]:.2f}×" if name in row["ratios"] else "1×"
            late = f"{one['late']} of {one['turns']}"
            computed = f"{one['computed']['median'] / undisturbed:.0%}"
            lines.append([label, format_quartiles(one["seconds"]), ratio, str(one["seconds"]["count"]), late, computed])
        heads = ["", "Until the bytes are here", "Over snapshot", "Times", "Late", "Computed"]
        blocks += [f"## {format_bytes(row['bytes'])}, {where(row)}", table(heads, lines)]
    return "\n\n".join(blocks)


def draw_one_sided(results: Results, figure: Any) -> None:
    """Draw times by size, one panel per place. Late times are hollow."""
    places = list(dict.fromkeys(row["mbps"] for row in results["rows"]))
    panels = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for axes, mbps in zip(panels, places, strict=True):
        rows = [row for row in results["rows"] if row["mbps"] == mbps]
        for k, name in enumerate(("snapshot", *GETS)):
            found = [row for row in rows if "seconds" in row["ways"].get(name, {})]
            sizes = [row["bytes"] / 2**20 for row in found]
            ways = [row["ways"][name] for row in found]
            axes.plot(sizes, [1e3 * one["seconds"]["median"] for one in ways], color=f"C{k}", lw=0.8, label=_WAYS[name])
            for size, one in zip(sizes, ways, strict=True):
                fill = "white" if one["late"] else f"C{k}"
                axes.plot(size, 1e3 * one["seconds"]["median"], "o", ms=5, mec=f"C{k}", mfc=fill)
        axes.set(xscale="log", yscale="log", xlabel="MiB", title=where(rows[0]))
    panels[0].set_ylabel("ms until the bytes are here (hollow: until rank 1 calls MPI)")
    panels[0].legend(fontsize=6)


REPORTS = {
    "scheduled_pull_one_sided": Report(one_sided, draw_one_sided),
    "scheduled_pull_pulls": Report(pulls, draw_pulls),
    "scheduled_pull_serving": Report(serving, draw_serving),
}
