"""Integrations with frameworks for training. Each module needs its framework, and is imported only when asked for.

    launch.py        a default group of torch.distributed for the ranks of any launcher
    optimizer.py     `DistributedOptimizer` as frameworks call it
    mean.py          the model to evaluate and save, if ranks have different ones
    lightning.py     Lightning: `SordinoStrategy`
    accelerate.py    Accelerate: `SordinoAccelerator`
    transformers.py  transformers: `Trainer` and `TrainingArguments`

Ray Train needs no module: `TorchConfig(backend="sordino")` (docs/frameworks.md).
"""
