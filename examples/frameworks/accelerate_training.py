"""Training with Accelerate, which prepares the optimizer and the loader. Only the optimizer is wrapped, not the model.

Under torchrun, Accelerate itself divides the data: give `prepare` a loader without a sampler.

  sordino run -np 2 -- python examples/frameworks/accelerate_training.py
"""

import torch
from accelerate import Accelerator

import sordino.torch as hvd

hvd.init()
accelerator = Accelerator(cpu=True)
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
model = torch.nn.Linear(8, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm="allreduce")
optimizer, loader = accelerator.prepare(optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
