"""GPT of `language.py`, which predicts the next byte, and its optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
"""Size of the vocabulary."""
_BETAS = (0.9, 0.95)  # usual for language models


class _Block(nn.Module):
    """Causal self-attention and an MLP. Each is applied to its normalized input, and added to the input (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [B, T, width] for its input of the same shape."""
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, width']
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return result


class GPT(nn.Module):
    """Decoder-only transformer on bytes: pre-norm, learned positions, tied embedding, no dropout, no biases.

    It has 12 layers * width^2 + (256 + context) * width parameters, besides the norms.

    Args:
        layers: number of blocks.
        width: size of the residual stream; a multiple of `heads`.
        heads: attention heads of a block.
        context: longest sequence, in bytes.
        seed: seed of the initial parameters.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # ranks that are threads share torch's own generator
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The outputs of 2 * layers branches are added up (GPT-2).
                branch = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if branch else 0.02, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits [B, T, 256] of the bytes that follow `inputs` [B, T], int64."""
        x = self.embedding(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits [B, T, 256] and the bytes [B, T] that followed, in nats, in float32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all other parameters, as one optimizer.

    `DistributedOptimizer` wraps one optimizer. Two wrappers would count steps and exchange parameters separately, and
    their gradients could not be clipped by one norm. Both parts use the groups and the state of this object, so
    learning rates and `load_state_dict` work as usual.

    Args:
        matrices: groups of 2-dimensional parameters.
        others: groups of all other parameters.
        lr: learning rate of both. Muon's is adjusted to updates of the size of AdamW's (`match_rms_adamw`).
    """

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], lr: float) -> None:
        self._muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=_BETAS)
        self._matrix_groups = len(matrices)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step of both. Return the closure's result."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._muon.param_groups = self.param_groups[: self._matrix_groups]
        self._adamw.param_groups = self.param_groups[self._matrix_groups :]
        for part in (self._muon, self._adamw):
            part.state = self.state
            part.step()
        return result


def optimizer_of(model: GPT, name: str, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return the optimizer of a model. Vectors do not decay.

    Args:
        model: the model.
        name: "adamw", or "muon": Muon for the matrices of the blocks, AdamW for all other parameters.
        lr: learning rate.
        weight_decay: weight decay of matrices and embeddings, as a multiple of the learning rate.
    """
    vectors = {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0}
    embeddings = [model.embedding.weight, model.positions.weight]
    matrices = [one for one in model.blocks.parameters() if one.dim() == 2]
    if name == "muon":
        decaying = {"params": embeddings, "weight_decay": weight_decay}
        return MuonWithAdamW([{"params": matrices, "weight_decay": weight_decay}], [decaying, vectors], lr)
    decaying = {"params": [*embeddings, *matrices], "weight_decay": weight_decay}
    return torch.optim.AdamW([decaying, vectors], lr=lr, betas=_BETAS)
