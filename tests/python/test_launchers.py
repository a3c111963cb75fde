"""What launchers that are not MPI's leave in the environment, and when a world of one would be beside others."""

from __future__ import annotations

import os

import pytest

import sordino.torch as hvd
from sordino.errors import UsageError
from sordino.launch.environment import launches, refuse_to_be_alone

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SRUN_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
# As a script of sbatch and a shell of salloc have it, whose processes nobody has multiplied.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
VARIABLES = {"HOROVOD_SIZE", "HOROVOD_RANK", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"} | {
    *TORCHRUN, *KUBEFLOW, *SRUN_OF_ONE, *BATCH, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nobody_has_started_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN, "WORLD_SIZE=4, RANK=1: torchrun has started 4 processes"),
        (KUBEFLOW, "WORLD_SIZE=4, RANK=1: a launcher of torch.distributed's kind (torchrun, Accelerate, "),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: "),
        ({"HOROVOD_SIZE": "3", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=3, HOROVOD_RANK=0: horovodrun has started 3"),
        ({"WORLD_SIZE": "1", "RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "JSM_NAMESPACE_SIZE=6: jsrun has started 6"),
        ({**TORCHRUN, **SRUN_OF_ONE}, "WORLD_SIZE=4, RANK=1: torchrun has started 4 processes"),
    ],
)
@pytest.mark.parametrize("comm", [None, [0]])
def test_a_world_of_one_beside_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str, comm: list[int] | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        hvd.init(comm)
    assert not hvd.is_initialized()
    text = str(caught.value)
    assert text.startswith(said)
    launch = max(launches(os.environ), key=lambda launch: launch.size)
    assert f"`sordino run -np {launch.size} -- python script.py`, or with mpirun" in text
    assert f"`unset {' '.join(launch.variables)}`" in text


def test_the_mend_for_notebooks_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        hvd.init()
    exec(str(caught.value).partition("notebook: ")[2], {"os": os})  # what it says
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, BATCH]
)
def test_who_is_alone_or_in_a_batch_script_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()


@pytest.mark.parametrize(
    ("mpi_size", "environment", "refused"),
    [
        (2, KUBEFLOW, False),  # left over, or each pod's: MPI's launcher came after it
        (4, TORCHRUN, False),
        (2, TORCHRUN, True),  # a torchrun for each of mpirun's ranks
        (1, KUBEFLOW, True),  # mpirun -np 1 in each pod
        (1, {**KUBEFLOW, "WORLD_SIZE": "1"}, False),
        (2, {"WORLD_SIZE": "many"}, False),
    ],
)
def test_beside_mpi(mpi_size: int, environment: dict[str, str], refused: bool) -> None:
    if refused:
        with pytest.raises(UsageError, match="WORLD_SIZE=4"):
            refuse_to_be_alone(mpi_size, environment)
    else:
        refuse_to_be_alone(mpi_size, environment)


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5"])
def test_a_number_that_is_none(value: str) -> None:
    with pytest.raises(UsageError, match=f"WORLD_SIZE='{value}' is no number of processes; correct it or unset it"):
        refuse_to_be_alone(0, {"WORLD_SIZE": value})
