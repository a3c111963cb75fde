"""Tasks on which `sordino plan` tries local models: a user's function, or a small network on available images."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sordino.data import load_digits, load_fashion_mnist
from sordino.errors import UsageError
from sordino.plan.workers import Task

_BATCH = 32


def from_file(text: str) -> Task:
    """Return the task that a function in a file returns.

    Args:
        text: "FILE.py:FUNCTION".

    Raises:
        UsageError: there is no such function, or it does not return a task.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise UsageError(f"--task {text}: no file '{file}'; write it as FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"sordino_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--task {text}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As for a script: its imports find modules in its folder, and dataclasses find their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--task {text}: {path} has no function '{name}'")
    task = function()
    if not isinstance(task, Task):
        raise UsageError(f"--task {text}: {name}() returned a {type(task).__name__}, not a sordino.plan.Task")
    return task


def images(name: str, data_dir: str | None) -> Task:
    """Return the task of three linear layers on "digits" or "fashion-mnist", SGD with momentum, mini-batches of 32."""
    found = load_digits() if name == "digits" else load_fashion_mnist(data_dir)
    inputs, labels = torch.from_numpy(found.train_images), torch.from_numpy(found.train_labels)

    def model() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            nn = torch.nn
            layers = [nn.Linear(found.image_size**2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
            return nn.Sequential(nn.Flatten(), *layers)

    def loss(model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
        rows = torch.from_numpy(np.random.Generator(np.random.PCG64((worker, step))).integers(len(labels), size=_BATCH))
        return torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])

    return Task(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9), loss)
