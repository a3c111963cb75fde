"""Checks that a wheel's module needs nothing that only newer systems have: `check_names.py WHEEL`.

What it needs is Python's, libsordino's, or of some version, which auditwheel judges. Nothing says what else a module
may leave open, so the linker reports nothing; the libraries are linked with `-z defs`, which does.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

UNVERSIONED = ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")


def names(path: Path, needed: bool) -> set[str]:
    """The names that a library needs, of no version, or those that it has."""
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        versions = elf.get_section_by_name(".gnu.version")
        return {
            symbol.name
            for k, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols())
            if (symbol["st_shndx"] == "SHN_UNDEF") == needed
            and not (needed and symbol["st_info"]["bind"] == "STB_WEAK")
            and not (needed and versions.get_symbol(k)["ndx"] not in UNVERSIONED)
        }


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
        ours = names(Path(folder, "sordino", "libsordino.so"), needed=False)
        (module,) = Path(folder, "sordino").glob("_core*.so")
        open_ones = sorted(name for name in names(module, needed=True) - ours if not name.startswith(("Py", "_Py")))
        if any(open_ones):
            raise SystemExit(f"{module.name} needs {', '.join(open_ones)}: neither Python's nor of a version")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
