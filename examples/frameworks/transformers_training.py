"""Training with the Trainer of transformers, which gets the wrapped optimizer.

Each rank has its part of the data set, and its own output folder.

  sordino run -np 2 -- python examples/frameworks/transformers_training.py
"""

import torch
from transformers import Trainer, TrainingArguments

import sordino.torch as hvd


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        found = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


hvd.init()
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = [{"x": one, "labels": one.sum(dim=0, keepdim=True)} for one in x]
model = Model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm="allreduce")
trainer = Trainer(
    model,
    TrainingArguments(output_dir=f"trained/{hvd.rank()}", use_cpu=True, num_train_epochs=3, report_to=[]),
    train_dataset=data[hvd.rank() :: hvd.size()],
    optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
)
trainer.train()
