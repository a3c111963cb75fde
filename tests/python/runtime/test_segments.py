"""Choice of parameters for each segment, in models as users have them."""

from __future__ import annotations

import pytest
import torch
from checks.models import make_model
from torch import nn

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import Crossover
from sordino.runtime.exchange.segments import segment_numbers

DEPTH = 6


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Lora(nn.Module):
    """A layer and its adapter, as in PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})


def holder(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def blocks(make=Block, count: int = DEPTH) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def llama() -> nn.Module:
    inner = holder(embed_tokens=nn.Embedding(5, 4), layers=blocks(), norm=nn.LayerNorm(4))
    return holder(model=inner, lm_head=nn.Linear(4, 5))


def peft() -> nn.Module:
    inner = holder(model=holder(model=holder(layers=blocks(lambda: holder(q_proj=Lora())))))
    return holder(base_model=inner)


def gpt2() -> nn.Module:
    return holder(transformer=holder(wte=nn.Embedding(5, 4), wpe=nn.Embedding(5, 4), h=blocks(), ln_f=nn.LayerNorm(4)))


def bert() -> nn.Module:
    encoder = holder(layer=blocks())
    return holder(bert=holder(embeddings=holder(word=nn.Embedding(5, 4)), encoder=encoder, pooler=nn.Linear(4, 4)))


def resnet() -> nn.Module:
    def stage() -> nn.Sequential:
        first = holder(conv1=nn.Conv2d(1, 1, 1), downsample=nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)))
        return nn.Sequential(first, holder(conv1=nn.Conv2d(1, 1, 1)))

    return holder(conv1=nn.Conv2d(1, 1, 1), layer1=stage(), layer2=stage(), fc=nn.Linear(2, 2))


MODELS = {
    "llama": (llama, DEPTH + 3),
    "peft": (peft, DEPTH),
    "gpt2": (gpt2, DEPTH + 3),
    "bert": (bert, DEPTH + 2),
    "resnet": (resnet, 6),
    "a row of rows": (
        lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()), nn.Linear(4, 4)),
        4,
    ),
    "small": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2),
}


def numbers(model: nn.Module) -> list[int]:
    named = list(model.named_parameters())
    return segment_numbers([name for name, _ in named], [4.0 * p.numel() for _, p in named], "blocks")


@pytest.mark.parametrize("name", MODELS)
def test_blocks(name: str) -> None:
    make, wanted = MODELS[name]
    found = numbers(make())
    assert max(found) + 1 == wanted
    owners: dict[str, set[int]] = {}
    for (label, _), number in zip(make().named_parameters(), found):
        owners.setdefault(".".join(label.split(".")[:-1]), set()).add(number)
    assert all(len(segments) == 1 for segments in owners.values()), "a module is in one segment"


@pytest.mark.parametrize("name", MODELS)
def test_wrappers_do_not_count(name: str) -> None:
    make, _ = MODELS[name]
    plain = numbers(make())
    assert numbers(torch.compile(make())) == plain
    assert numbers(holder(module=make())) == plain
    assert numbers(holder(module=torch.compile(make()))) == plain


@pytest.mark.parametrize(
    "names", [[f"group0.parameter{i}" for i in range(40)], [f"encoder.part_{i}.w" for i in range(40)]]
)
def test_a_large_model_without_blocks_is_cut_by_bytes(names: list[str]) -> None:
    sizes = [float(1 << 20)] * 40
    found = segment_numbers(names, sizes, "blocks")
    assert 10 <= max(found) + 1 <= 20
    assert found == sorted(found)
    small = segment_numbers(names, [1000.0] * 40, "blocks")
    assert max(small) == 0, "for less than 1 MiB a message is not worth it"


def test_an_optimizer_says_how_many_segments_there_are() -> None:
    def job() -> None:
        model = make_model("small", 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=Crossover())
        assert "2 segments" in repr(optimizer)
        assert "segments" not in repr(hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1)))

    sim.run(2, job)
