"""Module of Horovod's compiled functions. Access to any of them is an error that names the replacement."""

from __future__ import annotations

from typing import NoReturn

from sordino.errors import NoSuchAttribute


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NoSuchAttribute(
        f"mpi_lib_v2.{name}: the functions of Horovod's core are not those of Sordino's. Call what is made of them, "
        "such as hvd.allreduce_async() and hvd.synchronize()"
    )
