"""A rank that trains with Lightning: `lightning_worker.py plain|ddp|ALGORITHM`. Rank 0 prints the results as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import equal_on_all_ranks, flat, mean_on_all_ranks, report

from sordino.algorithms import AllReduce, Crossover, LocalSGD, PushSum
from sordino.errors import StepOrderError
from sordino.integrations.lightning import SordinoStrategy

KIND = sys.argv[1]
ALGORITHMS: dict[str, Any] = {
    "allreduce": "allreduce",
    "local-sgd": LocalSGD(interval=3),
    "shards": LocalSGD(interval=2, group_size=2, exchange="sharded"),
    "crossover": Crossover(interval=5),
    "push-sum": PushSum(interval=1),
    "double buffering": AllReduce(double_buffering=True),
    "layered": "layered",
}


def strategy() -> Any:
    if KIND == "plain":
        return "ddp"
    return SordinoStrategy(algorithm=None if KIND == "ddp" else ALGORITHMS[KIND])


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses: list[float] = []
        self.evaluated = torch.zeros(0)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x).float(), y)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.evaluated = flat(self)
        self.log("loss", torch.nn.functional.mse_loss(self.layers(x).float(), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer(epochs: int, **more: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": "callbacks" in more}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy=strategy(), **quiet, **saves, **more
    )


def loaders() -> list[torch.utils.data.DataLoader[Any]]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    return [torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle) for shuffle in (True, False)]


def model(seed: int = 0) -> Model:
    lightning.seed_everything(0, verbose=False)  # for the samplers
    torch.manual_seed(seed)
    return Model()


def fitted(trained: Model, epochs: int, path: str | None = None, **more: Any) -> lightning.Trainer:
    made = trainer(epochs, **more)
    made.fit(trained, *loaders(), ckpt_path=path)
    return made


def main() -> None:
    results: dict[str, Any] = {}
    for name, more in {
        "clipped and accumulated": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        "bf16": {"precision": "bf16-mixed"},
        "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    }.items():
        if KIND in ("shards", "double buffering") and name == "clipped by value":
            continue  # a rank has a part of the gradients only, or the first step uses no gradient
        trained = model()
        made = fitted(trained, 2, **more)
        results[name] = [*trained.losses, float(made.callback_metrics["loss"])]
        assert equal_on_all_ranks(trained), "ranks have other models after the fit"
    whole = model()
    fitted(whole, 2)
    saved = ModelCheckpoint("saved", save_last=True)
    half = model()
    first = fitted(half, 1, callbacks=[saved])
    checkpoint = torch.load("saved/last.ckpt", weights_only=False)
    state = checkpoint["optimizer_states"][0]
    results["state"] = state.get("sordino")
    first.strategy.barrier()
    resumed = model(seed=9 + first.global_rank)
    fitted(resumed, 2, "saved/last.ckpt")
    results["resumed"] = resumed.losses
    results["uninterrupted"] = whole.losses[len(half.losses) :]
    results["same model"] = equal_on_all_ranks(resumed)
    # Validation before the end of a fit sees the mean, and leaves the training as it is.
    seen = model()
    fitted(seen, 1, val_check_interval=5)
    unseen = model()
    fitted(unseen, 1, limit_val_batches=0)
    assert torch.equal(flat(seen), flat(unseen)), "validation has changed the training"
    evaluated = torch.nn.Module()
    evaluated.register_parameter("all", torch.nn.Parameter(seen.evaluated))
    assert equal_on_all_ranks(evaluated), "ranks have evaluated different models"
    assert torch.allclose(mean_on_all_ranks(seen), flat(seen))
    fitted(seen, 1)  # the same model by another trainer, while the first one is alive
    made.save_checkpoint("after the fit.ckpt")
    if KIND == "shards":
        try:
            fitted(model(), 1, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        except StepOrderError as error:
            assert "synchronize()" in str(error), error
        else:
            raise AssertionError("clipping by value was not refused")
    if made.is_global_zero:
        assert Path("after the fit.ckpt").is_file()
    report(results, made.is_global_zero)


if __name__ == "__main__":
    main()
