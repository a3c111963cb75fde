"""One rank that starts, trains one step and writes its times. Started by timings.transports.start.

Times are by the machine's clock, in seconds since $WAYS_BEGIN.
"""

import time

entered = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

imported_torch = time.time()


def main(by: str, folder: Path) -> None:
    """Train one step and write the times. `by` is "sordino", or "alone" for the same step without Sordino."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 8)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moments = {"entered": entered, "torch": imported_torch}
    if by == "sordino":
        import sordino.torch as hvd

        moments["sordino"] = time.time()
        hvd.init()
        moments["met"] = time.time()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    moments["stepped"] = time.time()
    begin = float(os.environ["WAYS_BEGIN"])
    (folder / f"{os.getpid()}.json").write_text(json.dumps({name: at - begin for name, at in moments.items()}))
    if by == "sordino":
        hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
