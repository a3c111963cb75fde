"""Ranks that are lost in `save_shards`, where others continue: the checkpoint is complete, or all raise PeerLost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, MakeCrew, Member, metric

import sordino.torch as hvd
from sordino import checkpoint
from sordino.checkpoint import Folder
from sordino.checkpoint import folder as folders
from sordino.errors import PeerLost
from sordino.runtime.context import current

STATE = {"x": torch.arange(10.0)}


@pytest.fixture
def crew(crew_of: MakeCrew) -> Crew:
    return crew_of(3)


def saving(folder: Folder, step: int) -> Any:
    def save(member: Member) -> str:
        try:
            folder.save_shards(step, checkpoint.share(STATE, hvd.rank(), hvd.size()))
        except PeerLost:
            return "lost"
        return "saved"

    return save


@pytest.mark.drill("a rank is lost in a checkpoint")
@pytest.mark.parametrize(
    ("writer", "kind", "victim", "outcome"),
    [
        (2, ".shard", 2, "lost"),  # while it writes its part
        (0, ".shard", 1, "lost"),  # while others write theirs
        (0, ".pt", 0, "lost"),  # when it is about to complete the checkpoint
        (0, ".pt", 2, "saved"),  # when its part is complete, and another rank completes the checkpoint
    ],
)
def test_a_checkpoint_is_complete_or_all_say_that_a_rank_is_lost(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: int, kind: str, victim: int, outcome: str
) -> None:
    folder, save, struck = Folder(tmp_path), folders.save, []

    def strike(path: Path, state: Any) -> None:
        if current().identity == writer and path.suffix == kind and not struck:
            struck.append(victim)
            crew.network.kill(victim)
            if victim == writer:
                time.sleep(0.05)
                raise OSError("this rank is gone")
        save(path, state)

    monkeypatch.setattr(folders, "save", strike)
    answers = crew.all(saving(folder, 1))
    assert struck and set(answers.values()) == {outcome}, answers
    assert folder.steps() == ([1] if outcome == "saved" else [])
    if outcome == "saved":
        assert torch.equal(folder.load(1)["x"], STATE["x"])
    assert {answer[:2] for answer in crew.all(metric).values()} == {(2, 2)}
    assert set(crew.all(saving(folder, 2)).values()) == {"saved"}
    assert torch.equal(folder.load(2)["x"], STATE["x"])
