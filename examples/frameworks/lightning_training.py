"""Training with Lightning, whose loop steps the wrapped optimizer that `configure_optimizers` returns.

The trainer has one device and leaves the sampler alone. Only rank 0 logs and writes checkpoints.

  sordino run -np 2 -- python examples/frameworks/lightning_training.py
"""

import lightning
import torch

import sordino.torch as hvd


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(optimizer, self.named_parameters(), algorithm="allreduce")


hvd.init()
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
model = Model()
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    use_distributed_sampler=False,
    logger=hvd.rank() == 0,
    enable_checkpointing=hvd.rank() == 0,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler))
