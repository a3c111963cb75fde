"""Who has started this process beside others, where it was not MPI's launcher: what it says of that in the environment.

What MPI's launchers and srun say the core reads (`_core.launcher`), and MPI then makes that world or does not. A batch
system's counts (SLURM_NTASKS) are no sign: a script on its first node has them, and runs alone. Only srun sets
SLURM_STEP_NUM_TASKS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sordino.errors import UsageError

_TORCHRUN = "TORCHELASTIC_RUN_ID"  # which nothing else sets; Accelerate starts torchrun
_LIKE_TORCHRUN = "a launcher of torch.distributed's kind (torchrun, Accelerate, DeepSpeed, Ray, Kubeflow)"
_LAUNCHERS = (
    (_LIKE_TORCHRUN, "WORLD_SIZE", "RANK"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)


@dataclass(frozen=True)
class Launch:
    """What a launcher says.

    Attributes:
        launcher: which it is.
        size: how many processes it has started, and in which variable that stands.
        variables: all that it has set of these, with their values.
    """

    launcher: str
    size: int
    size_variable: str
    variables: Mapping[str, str]


def launches(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yield what launchers other than MPI's say.

    Raises:
        UsageError: a number of processes is none.
    """
    for launcher, size_variable, rank_variable in _LAUNCHERS:
        text = environment.get(size_variable, "")
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"{size_variable}={text!r} is no number of processes; correct it or unset it")
        variables = {name: environment[name] for name in (size_variable, rank_variable) if environment.get(name)}
        by_torchrun = launcher == _LIKE_TORCHRUN and environment.get(_TORCHRUN)
        yield Launch("torchrun" if by_torchrun else launcher, int(text), size_variable, variables)


def refuse_to_be_alone(mpi_size: int, environment: Mapping[str, str]) -> None:
    """Raise UsageError where a launcher has started others that MPI does not reach: each would train on its own.

    Where MPI's launcher has started several, they are the world, whatever else the environment has from before; but a
    torchrun with another number was started by one of them, and its processes only have that one's variables.

    Args:
        mpi_size: of the world that MPI makes, as far as is known before it starts; 0 without MPI's launcher.
        environment: of this process.
    """
    if mpi_size > 1 and not environment.get(_TORCHRUN):
        return
    for launch in launches(environment):
        if launch.size in (1, mpi_size):
            continue
        said = ", ".join(f"{name}={value}" for name, value in launch.variables.items())
        names = list(launch.variables)
        raise UsageError(
            f"{said}: {launch.launcher} has started {launch.size} processes, which do not reach each other without "
            f"MPI, so each would train alone. Start the script with `sordino run -np {launch.size} -- python "
            f"script.py`, or with mpirun. If the variables are left from something else: `unset {' '.join(names)}`, or "
            f"before init() in a notebook: for name in {names}: os.environ.pop(name)"
        )
