"""Training with Ray Train: `TorchConfig(backend="sordino")`, and `sordino.torch` in the workers.

  python examples/frameworks/ray_training.py --algorithm local-sgd

With --plain the workers use DDP over gloo instead, and print the same loss.
"""

import argparse

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(options: dict) -> None:
    """Train on one worker."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x.sum(dim=1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if options["algorithm"] is None:
        model = prepare_model(model)  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options["algorithm"] is not None:
        import sordino.torch as hvd

        hvd.init()  # in the world of the process group
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=options["algorithm"])
    for step in range(40):
        rows = slice(32 * (step % 8) + 256 * rank // size, 32 * (step % 8) + 256 * rank // size + 32)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(x), y)
    torch.distributed.all_reduce(loss)
    ray.train.report({"loss": loss.item() / size})
    if rank == 0:
        print(f"loss {loss.item() / size:.7f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", help="an algorithm of Sordino; without one, DDP over its process group")
    parser.add_argument("--plain", action="store_true", help="use gloo")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"algorithm": None if args.plain else args.algorithm},
        torch_config=TorchConfig(backend="gloo" if args.plain else "sordino"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(),
    )
    trainer.fit()
