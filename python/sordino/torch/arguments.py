"""Interpretation of the arguments of `DistributedOptimizer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from sordino.codecs import Codec, codec_of
from sordino.errors import UsageError
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.parameter_names import nameless

Named = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None


def compression_of(given: type[Compressor] | Codec | str) -> tuple[type[Compressor], Codec | None]:
    """Return the cast that `compression=` names, and the codec.

    With a codec the cast is `Compression.none`; with a cast the codec is None.

    Raises:
        UsageError: `given` is neither a cast nor a codec.
    """
    if isinstance(given, type) and issubclass(given, Compressor):
        return given, None
    if not isinstance(given, (str, Codec)):
        raise UsageError(f"compression={given!r}: must be Compression.none, .fp16 or .bf16, or a codec such as Int8()")
    return Compression.none, codec_of(given, "compression")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(optimizer: torch.optim.Optimizer, named: Named | None) -> dict[torch.Tensor, str]:
    """Return the names of the optimizer's parameters. Raises UsageError for names that repeat or are missing."""
    if named is None:
        return _names_in(optimizer)
    if isinstance(named, torch.nn.Module) or not isinstance(named, Iterable):
        raise UsageError(
            f"named_parameters={type(named).__name__}(...): expected (name, parameter) pairs, usually "
            "model.named_parameters()"
        )
    entries = list(named)
    if not all(isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) for entry in entries):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually model.named_parameters()"
        )
    doubles = sorted(name for name, count in Counter(name for name, _ in entries).items() if count > 1)
    if doubles:
        raise UsageError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(doubles)}")
    names = {parameter: name for name, parameter in entries}
    unnamed = [p for p in parameters_of(optimizer) if p not in names]
    if unnamed:
        shapes = ", ".join(str(tuple(p.shape)) for p in unnamed[:5])
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"{len(unnamed)} are missing, of shapes {shapes}."
        )
    return names


def _names_in(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the names given to the optimizer (torch 2.6 and newer), or else places in its groups."""
    places = {p: (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    known = {
        parameter: name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()))
    }
    counts = Counter(known.values())
    return {
        parameter: known[parameter] if counts[known.get(parameter, "")] == 1 else nameless(g, i)
        for parameter, (g, i) in places.items()
    }


def group_indices(groups: Groups, parameters: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return Horovod's `groups` argument as indices: a number of groups, or lists of parameters."""
    if groups is None:
        return ()
    if isinstance(groups, int):
        if groups <= 0:
            raise UsageError(f"groups should be a positive integer or a list of lists of torch.Tensor, not {groups}.")
        size, extra = divmod(len(parameters), groups)
        bounds = [k * size + min(k, extra) for k in range(groups + 1)]
        return tuple(tuple(range(begin, end)) for begin, end in pairwise(bounds) if begin < end)
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    chosen: set[int] = set()
    result = []
    for group in groups:
        if not isinstance(group, Sequence) or not all(isinstance(p, torch.Tensor) for p in group):
            raise UsageError("groups must consist of lists of torch.Tensor.")
        members = tuple(index[id(p)] for p in group if p.requires_grad and id(p) in index)
        if chosen & set(members) or len(set(members)) != len(members):
            raise UsageError("A parameter can only appear once in groups.")
        chosen |= set(members)
        result.append(members)
    return tuple(result)
