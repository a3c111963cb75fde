"""What is expected of the CUDA kernels where there is no GPU to time them: docs/kernels.md, written or compared.

    python tools/kernel_table.py [--check] [--tree build/tree]

Registers and spills are what ptxas said when the tree was built (cmake/keep_ptxas.sh); bytes in flight and launches are
what the tree's `kernel_facts` says. With `--check` status 1 tells that a spill or a number of launches has grown, or
that the file is not what the same compiler gives now; another compiler may share out registers otherwise.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "kernels.md"
OBJECTS = "csrc/kernels/CMakeFiles/sordino_cuda_kernels.dir/cuda"

HEAD = """# Kernels
What the compiler and a count say of the CUDA kernels, for want of a GPU: `make kernel-table` writes this page, and the
tests compare it where CUDA is compiled. Bytes in flight are those that a thread has asked for before it needs the
first, in its widest accesses; a multiprocessor runs several hundred threads.

"""
KERNELS = """## Registers
Of each kernel the most over the sizes of its table: registers (on sm_80, on sm_90), bytes spilled (stored and loaded),
bytes of shared memory that are known when it is compiled, bytes in flight a thread.

"""
LAUNCHES = """
## Launches
On one of two ranks, of 161 float32 tensors as ResNet-50 has, in 18 segments; NCCL's own kernels are not counted. The
largest table among the launches' parameters, in words of 8 bytes.

"""

Table = dict[str, list[str]]


@dataclass
class Kernel:
    """The most that any of a kernel's instances takes."""

    registers: dict[str, int] = field(default_factory=dict)
    spilled: int = 0
    shared: int = 0


def short(name: str) -> str:
    """The kernel and its operation: no namespaces, parameters or size of the table. An enumerator is "Type number"."""
    name = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", r"\1 \2", name)
    name = re.sub(r"\(anonymous namespace\)::|sordino::|kernels::|cuda::|^void ", "", name)
    name = re.sub(r"Batch<\d+>(, )?", "", name.split("(")[0])
    return name.replace(" >", ">").replace("<>", "")


def readable(names: list[str]) -> list[str]:
    """The names as a C++ programmer writes them."""
    tool = shutil.which("c++filt")
    if tool is None:
        raise SystemExit("kernel_table: needs c++filt (binutils)")
    return subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()


def kernels_of(tree: Path) -> dict[str, Kernel]:
    """What ptxas has said, by short names."""
    said = [path.read_text() for path in sorted((tree / OBJECTS).glob("*.ptxas"))]
    if not said:
        raise SystemExit(f"kernel_table: nothing of CUDA was compiled in {tree}; build with SORDINO_CUDA=ON")
    pattern = re.compile(
        r"Compiling entry function '(\S+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    found = [match.groups() for text in said for match in pattern.finditer(text)]
    kernels: dict[str, Kernel] = {}
    for name, (_, target, stores, loads, registers, rest) in zip(
        readable([one[0] for one in found]), found, strict=True
    ):
        kernel = kernels.setdefault(short(name), Kernel())
        kernel.registers[target] = max(kernel.registers.get(target, 0), int(registers))
        kernel.spilled = max(kernel.spilled, int(stores) + int(loads))
        shared = re.search(r"(\d+) bytes smem", rest)
        kernel.shared = max(kernel.shared, int(shared[1]) if shared else 0)
    return kernels


def measured(tree: Path) -> tuple[Table, Table]:
    """The rows of both tables: (registers, registers, spilled, shared, in flight) and (launches, words)."""
    done = subprocess.run([tree / "tests" / "cpp" / "kernel_facts"], capture_output=True, text=True, check=True)
    facts = [line.split("\t") for line in done.stdout.splitlines()]
    in_flight = {short(words[1]): words[2] for words in facts if words[0] == "in flight"}
    rows = {}
    for name, kernel in sorted(kernels_of(tree).items()):
        operation = re.search(r"<(.*)>", name)
        numbers = [kernel.registers.get("sm_80", 0), kernel.registers.get("sm_90", 0), kernel.spilled, kernel.shared]
        rows[name] = [*map(str, numbers), in_flight.get(operation[1] if operation else "", "")]
    return rows, {words[1]: words[2:] for words in facts if words[0] == "launches"}


def compiler() -> str:
    """The last line of the compiler's name, which tells one version from another."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().splitlines()[-1]


def render(kernels: Table, launches: Table, by: str) -> str:
    """The page."""
    lines = ["| kernel | sm_80 | sm_90 | spilled | shared | in flight |", "|---|---|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(row)} |" for name, row in kernels.items()]
    counts = ["| step | launches | table |", "|---|---|---|"]
    counts += [f"| {name} | {' | '.join(row)} |" for name, row in launches.items()]
    body = "\n".join(lines) + "\n" + LAUNCHES + "\n".join(counts) + "\n"
    return f"{HEAD}Compiled by {by}.\n\n{KERNELS}{body}"


def grown(page: str, kernels: Table, launches: Table) -> list[str]:
    """Spills and launches that are more than the page has, or that it does not have."""
    rows = re.findall(r"^\| `?([^|`]+?)`? \| (.*) \|$", page, re.MULTILINE)
    known = {name: numbers.split(" | ") for name, numbers in rows}
    found = []
    for table, column, what in ((kernels, 2, "bytes spilled"), (launches, 0, "launches")):
        for name, row in table.items():
            before = known.get(name)
            if before is None:
                found.append(f"{name} is not there")
            elif int(row[column]) > int(before[column]):
                found.append(f"{name}: {row[column]} {what}, and not {before[column]}")
    return found


def compare(page: str, kernels: Table, launches: Table, by: str) -> list[str]:
    """What is wrong with the page."""
    wrong = grown(page, kernels, launches)
    if not wrong and f"Compiled by {by}." in page and page != render(kernels, launches, by):
        wrong.append("registers or others differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "tree", help="where it was built")
    options = parser.parse_args()
    kernels, launches = measured(options.tree)
    if not options.check:
        FILE.write_text(render(kernels, launches, compiler()))
        return 0
    wrong = compare(FILE.read_text(), kernels, launches, compiler())
    for line in wrong:
        print(f"docs/kernels.md: {line}")
    if wrong:
        print("If it has to be so, `make kernel-table` writes the page again.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
