"""Training with Lightning: a strategy of Sordino in place of Lightning's own.

  torchrun --nproc-per-node 2 examples/frameworks/lightning_training.py
  sordino run -np 2 -- python examples/frameworks/lightning_training.py --algorithm local-sgd

With --plain it uses Lightning's strategy "ddp" over gloo instead, under torchrun only, and prints the same loss.
"""

import argparse

import lightning
import torch

from sordino.integrations.lightning import SordinoStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", help="an algorithm of Sordino; without one, DDP over its process group")
parser.add_argument("--devices", type=int, default=2, help="number of ranks of each node")
parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy")
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("loss", torch.nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


lightning.seed_everything(0)
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=args.devices,
    strategy="ddp" if args.plain else SordinoStrategy(algorithm=args.algorithm),
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Model(),
    torch.utils.data.DataLoader(data, batch_size=32, shuffle=True),
    torch.utils.data.DataLoader(data, batch_size=128),
)
if trainer.is_global_zero:
    print(f"loss {float(trainer.callback_metrics['loss']):.7f}")
