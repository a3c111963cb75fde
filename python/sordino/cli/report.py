"""Makes one HTML file from the record of a run, or of several runs side by side, or serves it during training.

  sordino run --record runs/first -np 4 -- python train.py
  sordino report runs/first                         # writes runs/first/report.html
  sordino report runs/allreduce runs/push-sum runs/localsgd -o compare.html
  sordino report --live runs/first                  # prints an address for a browser on this machine

The file needs no other files, server or network. A folder that contains several records stands for all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sordino.errors import UsageError
from sordino.files import atomic_file
from sordino.record.reading import readers
from sordino.report.page.build import page
from sordino.report.page.contents import contents
from sordino.report.page.live import LiveServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino report`."""
    parser.usage = "sordino report [options] RUN [RUN ...]"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a record")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
        help="output file (default: report.html in RUN; compare.html in this folder for several runs)")  # fmt: skip
    parser.add_argument("--live", action="store_true", help="serve the page to this machine, with news every 2 seconds")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of --live (default: any free port)")


def main(options: argparse.Namespace) -> int:
    """Write the page, or serve it until Ctrl-C.

    Raises:
        UsageError: there is no record, or a file cannot be read or written.
        NotBuilt: a record has a newer format.
    """
    if options.live and options.output is not None:
        raise UsageError("--live serves the page and writes no file; omit -o or --live")
    if options.port and not options.live:
        raise UsageError("--port needs --live")
    found = readers(options.runs, lambda text: print(f"sordino report: {text}", file=sys.stderr))
    if options.live:
        with LiveServer(found, options.port) as server:
            print(server.address, flush=True)
            print("Press Ctrl-C to stop.", file=sys.stderr, flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return 0
    output = options.output or (found[0].folder / "report.html" if len(found) == 1 else Path("compare.html"))
    text = page([contents(reader) for reader in found])
    try:
        with atomic_file(output) as file:
            file.write(text.encode(errors="replace"))  # names of folders may be any bytes
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    print(output)
    return 0
