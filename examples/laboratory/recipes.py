"""Recipes of `train.py`: the optimizer, the learning rate of every step, and the smoothing of labels."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import sordino.torch as hvd
from laboratory.common import learning_rate

PER_IMAGES = 256
"""Mini-batch size for which the learning rate of large-batch is given. The linear rule scales it to --batch-size."""
_WARM_UP = 36 / 90  # fraction of all steps
_TRUST, _DECAY = 0.0025, 5e-5  # settings of LARS


@dataclass(frozen=True)
class Recipe:
    """Values of a recipe for options that were not given.

    Attributes:
        lr: the learning rate; for large-batch the rate for 256 images.
        momentum: momentum of the optimizer.
        label_smoothing: fraction of a label's weight that is spread over all classes.
    """

    lr: float
    momentum: float
    label_smoothing: float


RECIPES = {"plain": Recipe(0.05, 0.9, 0.0), "large-batch": Recipe(1.0, 0.96, 0.1)}
"""large-batch is Table 1 of the Crossover-SGD paper: LARS, labels smoothed by 0.1, and a rate that follows the linear
rule, rises for two fifths of the steps, and falls to zero as a cosine. The rate itself is ours: with mini-batches of
512 and 2048, AllReduce is best at rates of 2 and 4, and collapses at 8 and 16 (docs/claims.md, crossover-table-1)."""


def optimizer(args: argparse.Namespace, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer to wrap."""
    if args.recipe == "large-batch":
        return hvd.LARS(parameters, args.lr, args.momentum, weight_decay=_DECAY, trust_coefficient=_TRUST)
    return torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum)


def rate(args: argparse.Namespace, step: int, steps: int) -> float:
    """Return the learning rate of step number `step` of `steps`. It depends on these only, so training can resume."""
    if args.recipe == "plain":
        return learning_rate(args.lr, step)
    most: float = args.lr * args.batch_size / PER_IMAGES
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return most * (step + 1) / rising
    return most * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1))) / 2
