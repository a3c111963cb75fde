"""Makes a folder with which the linker makes libraries for older systems: `older_system.py FOLDER POLICY`.

One idea: what a library needs of a system is the list of names, each with its version, that the linker takes from the
system's libraries; so one links against lists that end where the older system's do. For each of the C and C++ libraries
FOLDER gets a library with no code, which has the names of this system's up to the versions that auditwheel's POLICY
(manylinux_2_28) allows. What came later is linked statically: of C++ from the compiler's own libstdc++.a, as Red Hat's
toolsets do, and of C from missing.c, which says it in terms of what was there before. Link with `-L FOLDER
-Wl,--exclude-libs,ALL`; what neither has is undefined, which `-Wl,-z,defs` reports.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import auditwheel.policy
from elftools.elf.elffile import ELFFile

HERE = Path(__file__).resolve().parent
# By the name that the linker looks for: the library of this system, and those of its names that lay apart until they
# all moved into libc.so.6.
THREADS, LOADER = r"(__)?pthread_|sem_", r"dl(open|close|sym|vsym|error|addr1?|info|mopen)$"
REALTIME, TERMINALS = r"(aio|lio|mq|shm|timer)_", r"(openpty|forkpty|login|login_tty|logout|logwtmp)$"
LIBRARIES = {
    "libstdc++.so": ("libstdc++.so.6", ""),
    "libm.so": ("libm.so.6", ""),
    "libpthread.so": ("libc.so.6", THREADS),
    "libdl.so": ("libc.so.6", LOADER),
    "librt.so": ("libc.so.6", REALTIME),
    "libutil.so": ("libc.so.6", TERMINALS),
    "libc.so": ("libc.so.6", f"(?!{THREADS}|{LOADER}|{REALTIME}|{TERMINALS})"),
}
SONAMES = {
    "libstdc++.so": "libstdc++.so.6",
    "libm.so": "libm.so.6",
    "libpthread.so": "libpthread.so.0",
    "libdl.so": "libdl.so.2",
    "librt.so": "librt.so.1",
    "libutil.so": "libutil.so.1",
    "libc.so": "libc.so.6",
}
APART = ("libpthread.so", "libdl.so", "librt.so", "libutil.so")
SECTIONS = {"STT_OBJECT": (".data", "object"), "STT_TLS": ('.section .tbss,"awT",@nobits', "tls_object")}


def allowed(policy: str) -> dict[str, set[str]]:
    """The versions that a policy allows, by family (GLIBC, GLIBCXX, ...)."""
    text = (Path(auditwheel.policy.__file__).parent / "manylinux-policy.json").read_text()
    for one in json.loads(text):
        if policy in (one["name"], *one["aliases"]):
            return {family: set(versions) for family, versions in one["symbol_versions"][platform.machine()].items()}
    raise SystemExit(f"older_system: auditwheel has no policy {policy!r}")


def found(name: str) -> Path:
    """The file that the compiler links for a library's name."""
    said = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(said).is_absolute():
        raise SystemExit(f"older_system: g++ does not know where {name} is")
    return Path(said).resolve()


def numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version)]


def names_of(library: Path, pattern: str, versions: dict[str, set[str]]) -> dict[str, tuple[str, str]]:
    """The names that a library defines, with the newest of their versions that is allowed, and what each stands for."""
    chosen: dict[str, tuple[str, str]] = {}
    with library.open("rb") as file:
        elf = ELFFile(file)
        definitions = elf.get_section_by_name(".gnu.version_d")
        nodes = {entry["vd_ndx"]: next(aux).name for entry, aux in definitions.iter_versions()}
        indices = elf.get_section_by_name(".gnu.version")
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            index = indices.get_symbol(number)["ndx"]
            if (
                symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS")
                or not isinstance(index, int)
                or not re.match(pattern, symbol.name)
            ):
                continue
            version = nodes[index & 0x7FFF]
            family, _, rest = version.partition("_")
            if rest not in versions.get(family, ()):
                continue
            before = chosen.get(symbol.name)
            if before is None or numbers(before[0]) < numbers(version):
                chosen[symbol.name] = version, symbol["st_info"]["type"]
    return chosen


def make_stub(folder: Path, soname: str, names: dict[str, tuple[str, str]]) -> None:
    """Make a library of this soname that has the names, each as a symbol of no size."""
    lines = ['.section .note.GNU-stack,"",@progbits']
    for k, (name, (version, kind)) in enumerate(names.items()):
        section, told = SECTIONS.get(kind, (".text", "function"))
        lines += [section, f".globl s{k}", f".type s{k}, @{told}", f's{k}: .symver s{k}, "{name}@@{version}"']
    (folder / "stub.s").write_text("\n".join(lines) + "\n")
    nodes = "".join(f"{version} {{ }};\n" for version in sorted({version for version, _ in names.values()}))
    (folder / "stub.map").write_text(nodes + "LOCAL { local: s*; };\n")
    words = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={folder / 'stub.map'}"]
    subprocess.run(["gcc", *words, "-o", str(folder / soname), str(folder / "stub.s")], check=True)


def main(folder: Path, policy: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    versions = allowed(policy)
    for name, (library, pattern) in LIBRARIES.items():
        make_stub(folder, SONAMES[name], names_of(found(library), pattern, versions))
    subprocess.run(["gcc", "-O2", "-fPIC", "-c", "-o", folder / "missing.o", HERE / "missing.c"], check=True)
    subprocess.run(["ar", "rcs", folder / "libmissing.a", folder / "missing.o"], check=True)
    lists = {name: folder / soname for name, soname in SONAMES.items()}
    c = f"{lists['libc.so']} {folder / 'libmissing.a'} {found('libc_nonshared.a')}"
    apart = " ".join(str(lists[name]) for name in APART)
    (folder / "libc.so").write_text(f"GROUP({c} AS_NEEDED({apart} /lib64/ld-linux-x86-64.so.2))\n")
    (folder / "libstdc++.so").write_text(f"GROUP({lists['libstdc++.so']} {found('libstdc++.a')})\n")
    for name in ("libm.so", *APART):
        (folder / name).write_text(f"INPUT({lists[name]})\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
