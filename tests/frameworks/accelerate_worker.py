"""A rank that trains with Accelerate: `accelerate_worker.py plain|ddp|ALGORITHM`. Rank 0 prints the results as JSON."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ranks import equal_on_all_ranks, flat, mean_on_all_ranks, report

import sordino.torch as hvd
from sordino.algorithms import Crossover, LocalSGD
from sordino.errors import UsageError
from sordino.integrations.accelerate import SordinoAccelerator

KIND = sys.argv[1]
ALGORITHMS: dict[str, Any] = {
    "allreduce": "allreduce",
    "local-sgd": LocalSGD(interval=3),
    "shards": LocalSGD(interval=2, group_size=2, exchange="sharded"),
    "crossover": Crossover(interval=5),
}


def accelerator(**named: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=False)
    if KIND == "plain":
        return Accelerator(cpu=True, **named)
    return SordinoAccelerator(cpu=True, algorithm=None if KIND == "ddp" else ALGORITHMS[KIND], **named)


class Training:
    """A training that can be continued."""

    def __init__(self, seed: int = 0, turned: bool = False, **named: Any) -> None:
        self.accelerator = accelerator(**named)
        torch.manual_seed(seed)
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
        if turned:
            optimizer, model = self.accelerator.prepare(optimizer, model)
            loader, scheduler = self.accelerator.prepare(loader, scheduler)
        else:
            model, optimizer, loader, scheduler = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler
        self.losses: list[float] = []

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(x).float(), y)
                self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


def main() -> None:
    results: dict[str, Any] = {}
    for name, more in {
        "clipped and accumulated": {"gradient_accumulation_steps": 2},
        "bf16": {"mixed_precision": "bf16"},
        "the optimizer before the model": {"turned": True},
    }.items():
        training = Training(hvd.rank() if KIND != "plain" and name.startswith("the") else 0, **more)
        training.epoch()
        results[name] = training.losses
    whole = Training()
    whole.epoch()
    whole.accelerator.save_state("saved")
    whole.losses.clear()
    whole.epoch()
    resumed = Training(seed=5)
    resumed.accelerator.load_state("saved")
    resumed.epoch()
    results["resumed"], results["uninterrupted"] = resumed.losses, whole.losses
    if KIND != "plain":
        own = flat(resumed.model)
        mean = mean_on_all_ranks(resumed.model)
        if KIND != "ddp":
            with resumed.accelerator.averaged(resumed.model):
                assert torch.allclose(flat(resumed.model), mean)
            assert torch.equal(flat(resumed.model), own)
            if KIND == "crossover":
                assert not torch.equal(own, mean)
            lonely = accelerator()
            try:
                lonely.prepare(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
            except UsageError as error:
                assert "its model is not prepared yet" in str(error)
            else:
                raise AssertionError("an optimizer without its model was not refused")
        results["backend"] = [str(resumed.accelerator.state.backend), torch.distributed.get_backend()]
        resumed.accelerator.end_training()
        assert equal_on_all_ranks(resumed.model)
    report(results, whole.accelerator.is_main_process)


if __name__ == "__main__":
    main()
