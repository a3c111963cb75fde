"""Training with Accelerate: `SordinoAccelerator` in place of `Accelerator`.

  torchrun --nproc-per-node 2 examples/frameworks/accelerate_training.py
  sordino run -np 2 -- python examples/frameworks/accelerate_training.py --algorithm local-sgd

With --plain it uses Accelerate's own class over gloo instead, under torchrun only, and prints the same loss.
"""

import argparse
import contextlib

import torch
from accelerate import Accelerator

from sordino.integrations.accelerate import SordinoAccelerator

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", help="an algorithm of Sordino; without one, DDP over its process group")
parser.add_argument("--plain", action="store_true", help="use Accelerate's own class")
args = parser.parse_args()

if args.plain:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
else:
    accelerator = SordinoAccelerator(cpu=True, gradient_accumulation_steps=2, algorithm=args.algorithm)
torch.manual_seed(0)
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
model.eval()
with torch.no_grad(), contextlib.nullcontext() if args.plain else accelerator.averaged(model):
    losses = [accelerator.gather_for_metrics((model(x) - y) ** 2) for x, y in loader]
accelerator.print(f"loss {torch.cat(losses).mean().item():.7f}")
accelerator.end_training()
