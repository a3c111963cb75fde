"""transformers: `from sordino.integrations.transformers import Trainer, TrainingArguments`.

The names are those of transformers, so that a script has to change only its imports. A callback would come too late:
the trainer has wrapped the model in DDP before the first callback that gets the optimizer.
"""

from __future__ import annotations

from typing import Any

import sordino.torch as hvd
from sordino.algorithms import Algorithm
from sordino.errors import UsageError
from sordino.integrations import launch
from sordino.integrations.accelerate import SordinoAccelerator
from sordino.integrations.mean import settle
from sordino.integrations.optimizer import FrameworkOptimizer

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "sordino.integrations.transformers needs transformers 5: pip install 'sordino[transformers]'"
    ) from error

__all__ = ["Trainer", "TrainingArguments"]


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` for the ranks of `sordino run`, mpirun, torchrun or `accelerate launch`.

    The constructor joins the world and creates the process group "sordino", before transformers would create one of
    gloo. Collective.
    """

    def __post_init__(self) -> None:
        launch.join()
        super().__post_init__()


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with an algorithm of Sordino, or with DDP over its process group.

    With an algorithm, the parameters and buffers of rank 0 are copied to all ranks when training begins, the model is
    not wrapped, and the optimizer becomes a `DistributedOptimizer`. If ranks have different models (gossip, local SGD),
    checkpoints hold their mean, evaluation during the training uses it, and all ranks have it when the training ends.

    Args:
        *arguments: as for `transformers.Trainer`, with `TrainingArguments` of this module.
        algorithm: an algorithm of `sordino.algorithms` or its name; None for DDP.
        **named: as for `transformers.Trainer`.

    Raises:
        UsageError: the algorithm is unknown, or `args` do not know the ranks of the launcher.
    """

    def __init__(self, *arguments: Any, algorithm: Algorithm | str | None = None, **named: Any) -> None:
        self._algorithm = algorithm
        self._mean_state: dict[str, Any] | None = None
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        launch.join()
        if self.args.world_size != hvd.size():
            raise UsageError(
                f"Trainer(args=...): the arguments are for {self.args.world_size} processes, but the launcher has "
                f"started {hvd.size()} ranks. Use sordino.integrations.transformers.TrainingArguments"
            )
        SordinoAccelerator.adopt(self.accelerator, self._algorithm)

    @property
    def _distributed(self) -> list[FrameworkOptimizer]:
        """The optimizer with an algorithm, if there is one."""
        return self.accelerator.distributed_optimizers(self.model) if self.is_in_train else []

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        with self.accelerator.mean_model.inside(self.model, self._distributed):
            return super().evaluation_loop(*arguments, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; during a training, the mean over ranks, which is collective."""
        optimizers = self._distributed
        self._mean_state = self.accelerator.mean_model.state_dict(self.model, optimizers) if optimizers else None
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._mean_state = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._mean_state if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizers = self._distributed
        if not optimizers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        with optimizers[0].collected_state():
            super()._save_optimizer_and_scheduler(output_dir)

    def _finalize_training(self, *arguments: Any) -> Any:
        settle(self.model, self._distributed)  # before the best model may be loaded
        return super()._finalize_training(*arguments)
