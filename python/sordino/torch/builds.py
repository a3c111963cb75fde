"""Horovod's functions that tell what a build contains, and what this world uses."""

from __future__ import annotations

from sordino import _core
from sordino.runtime.context import current, current_or_none


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that the compiled core for a framework exists. It always does for torch, which this module needs itself.

    Args:
        ext_name: the module, such as "horovod.torch".
        ext_env_var: name for Horovod's message. Ignored, because Sordino has one core, in another place.
        pkg_path: folder in which Horovod looks. Ignored.
        *args: paths below it. Ignored.

    Raises:
        ImportError: the module is for another framework.
    """
    if ext_name.rpartition(".")[2] != "torch":
        raise ImportError(f"{ext_name} does not exist: Sordino supports PyTorch only")


def mpi_threads_supported() -> bool:
    """Return whether other threads may use MPI as well. With MPI this is always so, because init requires it."""
    current()
    return mpi_built()


def mpi_enabled() -> bool:
    """Return whether this world runs over MPI."""
    context = current_or_none()
    return context is not None and context.world.transport.startswith("mpi")


def transport() -> str:
    """Return the transport of this world: "local", "mpi", "ucx" (and shared memory), or "sim"."""
    return str(current().world.transport)


def mpi_built() -> bool:
    """Return whether this build contains the MPI transport."""
    return _core.build_info()["mpi"] is not None


def gloo_built() -> bool:
    """Return False always: Sordino does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Return False always: Sordino does not use Gloo."""
    return False


def nccl_built() -> int:
    """Return 0 always: NCCL is not built in, but loaded at run time."""
    return 0


def cuda_built() -> bool:
    """Return whether this build contains the CUDA kernels."""
    return bool(_core.build_info()["cuda"])


def rocm_built() -> bool:
    """Return False always: Sordino has no ROCm kernels."""
    return False


def ddl_built() -> bool:
    """Return False always: Sordino does not use IBM DDL."""
    return False


def ccl_built() -> bool:
    """Return False always: Sordino does not use oneCCL."""
    return False
