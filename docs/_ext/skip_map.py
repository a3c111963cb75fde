"""Drawing of the tensors that parameter skipping leaves out, from the statistics of a real training.

Two ranks (threads) train an embedding. Some rows are drawn often and most rows seldom, so a step leaves most blocks
unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from docutils import nodes
from matplotlib import pyplot
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import sordino.torch as hvd
from _ext.inline_svg import COLOURS, INK, picture, style
from _ext.markdown import parsed
from sordino import sim
from sordino.algorithms import CaPS

STEPS = 24
_ROWS, _WIDTH, _BATCH = 1024, 16, 16
ALGORITHM = CaPS(threshold=100, granularity="block", block_bytes=1024, statistics_interval=1)


def train() -> dict[str, Any]:
    """Train on one rank; return the statistics."""
    draws = torch.Generator().manual_seed(hvd.rank())
    first = torch.Generator().manual_seed(7)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(_ROWS, _WIDTH), "head": torch.nn.Linear(_WIDTH, 1)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=first))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), algorithm=ALGORITHM
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = (_ROWS * torch.rand(_BATCH, generator=draws) ** 4).long()
        model["head"](model["table"](rows)).square().mean().backward()
        optimizer.step()
    found: dict[str, Any] = optimizer.statistics.as_dict()
    return found


def skip_map(found: dict[str, Any]) -> nodes.raw:
    """Return the drawing of statistics: the share of each tensor that is left out, and the share sent, by step."""
    names = [tensor["name"] for tensor in found["tensors"]]
    skipped = [[100 * point["skipped"][row] for point in found["points"]] for row in range(len(names))]
    sent = [100 * point["bytes_sent"] / point["bytes_unskipped"] for point in found["points"]]
    steps = range(len(sent))
    with style("skip map"):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.4, 3.2), sharex=True, layout="constrained")
        shades = above.pcolormesh(
            [*steps, len(sent)], range(len(names) + 1), skipped, cmap="cividis", vmin=0, vmax=100, edgecolor="face"
        )
        above.set(yticks=[row + 0.5 for row in range(len(names))], yticklabels=names, title="left out, %")
        above.invert_yaxis()
        figure.colorbar(shades, ax=above).outline.set_edgecolor(INK)
        below.step(steps, sent, where="post", color=COLOURS[0])
        below.set(xlabel="step", ylabel="sent, %", ylim=(0, 105), xlim=(0, len(sent)))
        part = f"{sum(sent) / len(sent):.0f} % is sent"
        return picture(figure, "skip map", f"The parts of each tensor that are left out in {len(sent)} steps; {part}")


class SkipMap(SphinxDirective):
    """The drawing, and a caption that describes the training."""

    def run(self) -> list[nodes.Node]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # ranks are threads already
        try:
            found = sim.run(2, train)[0]
        finally:
            torch.set_num_threads(threads)
        part = 100 * found["bytes_sent"] / found["bytes_unskipped"]
        text = (
            f"*The blocks that two ranks leave out under `{ALGORITHM.written()}`. They train an embedding of {_ROWS} "
            f"rows, {_BATCH} of which are in a batch: {part:.0f} % of all bytes are sent, and nothing is lost.*"
        )
        return [skip_map(found), *parsed(self, text)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("skip-map", SkipMap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
