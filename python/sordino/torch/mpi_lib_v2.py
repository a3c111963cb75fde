"""Module of Horovod's compiled functions. Access to any of them is an error that names the replacement."""

from __future__ import annotations

from typing import NoReturn

from sordino.errors import NoSuchAttribute


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NoSuchAttribute(
        f"mpi_lib_v2.{name}: Sordino's core does not have the functions of Horovod's core. Call the functions of "
        "sordino.torch, such as hvd.allreduce_async() and hvd.synchronize()"
    )
