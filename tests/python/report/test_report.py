"""`sordino report`: records and their problems, the page and its limits, and the server of --live."""

from __future__ import annotations

import base64
import errno
import hashlib
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import recorded
import torch
from checks.commands import launch

import sordino.algorithms
import sordino.torch as hvd
from sordino import sim
from sordino._core import SimNetwork
from sordino.algorithms import CaPS, Layered, LocalSGD, PushSum, ScheduledPull
from sordino.cli.app import main
from sordino.errors import NotBuilt, UsageError
from sordino.record import writing
from sordino.record.reading import Reader, readers
from sordino.record.writing import Lines, job_file
from sordino.report.page.build import asset, embedded, page
from sordino.report.page.contents import contents
from sordino.report.page.live import LiveServer
from sordino.report.page.waits import attributed
from sordino.runtime.context import current
from sordino.runtime.recorder import Recorder


def shown(folder: Path) -> dict[str, Any]:
    return contents(Reader(folder))


# --- Records ----------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_and_told(tmp_path: Path) -> None:
    found = shown(recorded.write(tmp_path / "run", faults=True))
    assert [note for note in found["notes"] if "rank-00003.jsonl" in note and "is incomplete" in note]
    assert found["ranks"][3]["fate"] == "lost" and found["ranks"][3]["steps"] == 100
    recovered = [event for event in found["events"] if event["what"] == "recovery"]
    assert len(recovered) == 3 and "Continued without 3 in epoch 1" in recovered[0]["text"]


def test_a_line_that_was_torn_before_a_restart_stays_a_line_by_itself(tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "run", faults=True) / "rank-00003.jsonl"
    again = Lines(path)
    again.write("rank", rank=3, start=1, time=recorded.ZERO + 9, size=4)
    again.write("end", step=100, time=recorded.ZERO + 10)
    found = shown(tmp_path / "run")
    assert [note for note in found["notes"] if note.startswith("rank-00003.jsonl: 1 incomplete line was skipped")]
    assert found["ranks"][3]["fate"] == "finished"
    assert [line["start"] for line in Reader(tmp_path / "run").run.ranks[3].of("rank")] == [0, 1]


def test_what_a_file_gains_is_read_and_no_half_of_a_line(tmp_path: Path) -> None:
    recorded.write(tmp_path, ranks=2, steps=10)
    reader = Reader(tmp_path)
    assert contents(reader)["summary"]["steps"] == 10 and not reader.update()
    step = {
        "kind": "step",
        "step": 11,
        "steps": 1,
        "time": recorded.ZERO + 9,
        "seconds": 1,
        "exposed": 0,
        "busy": 0,
        "sent": {},
    }
    text = json.dumps(step) + "\n"
    with open(tmp_path / "rank-00000.jsonl", "a") as file:
        file.write(text[:20])
        file.flush()
        reader.update()
        assert contents(reader)["summary"]["steps"] == 10
        file.write(text[20:])
    assert reader.update() and contents(reader)["summary"]["steps"] == 11


def test_steps_that_were_taken_again_are_shown_as_the_last_time(tmp_path: Path) -> None:
    file = Lines(tmp_path / "rank-00000.jsonl")
    for start, steps in ((0, range(1, 9)), (1, range(5, 11))):
        file.write("rank", rank=0, start=start, time=100.0 + start, size=1)
        for step in steps:
            file.write("metrics", step=step, time=100.0 + 10 * start + step, values={"loss": float(start)})
    curve = shown(tmp_path)["metrics"]["loss"]
    assert curve["step"] == list(range(1, 11)) and curve["mean"] == [0.0] * 4 + [1.0] * 6


def test_the_step_of_a_checkpoint_is_not_repeated(tmp_path: Path) -> None:
    """The second start continues from step 4, as it says before its first step."""
    file = Lines(tmp_path / "rank-00000.jsonl")
    for start, steps in ((0, range(1, 7)), (1, range(5, 8))):
        file.write("rank", rank=0, start=start, time=100.0 + start, size=1)
        if start:
            file.write("metrics", step=4, time=100.0 + 10 * start, values={})
        for step in steps:
            file.write("metrics", step=step, time=100.0 + 10 * start + step, values={"loss": float(start)})
    curve = shown(tmp_path)["metrics"]["loss"]
    assert curve["step"] == list(range(1, 8)) and curve["mean"] == [0.0] * 4 + [1.0] * 3


@pytest.mark.parametrize("numbers", [(0, 1), (0, 0)])
def test_another_start_in_the_same_files_is_a_repetition(tmp_path: Path, numbers: tuple[int, int]) -> None:
    """Also without a number: two jobs with SORDINO_RECORD, or `init()` again in one process."""
    file = Lines(tmp_path / "rank-00000.jsonl")
    for start, number in enumerate(numbers):
        file.write("rank", rank=0, start=number, time=100.0 + start, size=1)
        for step in range(1, 4):
            file.write("metrics", step=step, time=100.0 + 10 * start + step, values={"loss": 10.0 * start + step})
    found = shown(tmp_path)
    assert found["metrics"]["loss"]["mean"] == [11.0, 12.0, 13.0]


@pytest.mark.parametrize("variable", ["SORDINO_RESTART", "TORCHELASTIC_RESTART_COUNT"])
def test_the_start_has_its_launchers_number(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SORDINO_RESTART", raising=False)
    monkeypatch.setenv(variable, "3")
    Recorder(sim.contexts(1)[0], str(tmp_path))
    assert Reader(tmp_path).run.ranks[0].of("rank")[0]["start"] == 3


def test_a_torn_file_on_a_full_disk_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(b'{"kind":"st')

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "write", full)
    file = Lines(path)
    file.write("rank", rank=0)
    file.write("step", step=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"the record {path} ends here: No space left on device"
    ]


def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    run = recorded.write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")), ranks=1, steps=2)
    done = launch("report", str(run))
    assert done.returncode == 0 and (run / "report.html").exists(), done.stderr


def test_a_long_run_makes_a_short_page(tmp_path: Path) -> None:
    found = shown(recorded.write(tmp_path, ranks=2, steps=5000))
    assert len(found["steps"]["step"]) == len(found["metrics"]["loss"]["mean"]) == 400
    assert found["summary"]["exposed"] == pytest.approx(sum(found["steps"]["exposed"]) / 400, rel=0.02)


def test_a_wait_is_for_whoever_came_last() -> None:
    spans = [
        ["wait", 0.0, 10.0, -1, 0, ""],
        ["meet", -1.0, 4.0, 2, 0, "a"],  # rank 2 began it last, at 4
        ["move", 4.0, 6.0, -1, 8, "a"],
        ["meet", 1.0, 9.0, 0, 0, "b"],  # this rank itself was the last
        ["move", 6.0, 9.0, 3, 8, "b"],
    ]
    parts = list(attributed(spans, rank=0))
    assert sum(end - begin for begin, end, _ in parts) == pytest.approx(10.0)
    by_peer = {peer: sum(end - begin for begin, end, one in parts if one == peer) for peer in (2, 3, -1)}
    assert by_peer == pytest.approx({2: 4.0, 3: 3.0, -1: 3.0})


def test_a_rank_that_joins_is_in_the_windows_of_its_steps(tmp_path: Path) -> None:
    recorded.write(tmp_path, ranks=2)
    head, *lines = map(json.loads, (tmp_path / "rank-00000.jsonl").read_text().splitlines())
    late = [head | {"rank": 2}, *(line for line in lines if line.get("step", 0) >= 130)]
    (tmp_path / "rank-00002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in late))
    windows = shown(tmp_path)["windows"]
    assert [(one["first"], one["last"]) for one in windows] == [(0, 32), (63, 71), (127, 135)]
    assert [[row["rank"] for row in one["rows"]] for one in windows] == [[0, 1], [0, 1], [0, 1, 2]]
    (tmp_path / "rank-00000.jsonl").unlink()
    early = [head, *(line for line in lines if line.get("step", 0) <= 40)]
    (tmp_path / "rank-00001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in early))
    assert [(one["first"], one["last"]) for one in shown(tmp_path)["windows"]] == [(0, 32), (129, 135)]


def test_a_folder_of_records_stands_for_all_of_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        recorded.write(tmp_path / name, ranks=2, steps=4)
    assert [reader.run.name for reader in readers([tmp_path])] == ["a", "b"]


# --- Problems ---------------------------------------------------------------------------------------------------------


def test_what_is_no_record_has_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, complaint in ((tmp_path / "none", "no such folder"), (tmp_path, "no record in it")):
        assert main(["report", str(place)]) == 2
        told = capsys.readouterr().err
        assert complaint in told and "sordino run --record" in told
    recorded.write(tmp_path / "run", steps=4)
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "no" / "such.html")]) == 2
    assert "such.html: cannot be written" in capsys.readouterr().err
    assert main(["report", "--live", str(tmp_path / "run"), "-o", "x.html"]) == 2
    assert main(["report", "--port", "80", str(tmp_path / "run")]) == 2


def test_a_newer_format_has_status_1_and_says_whose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-00000.jsonl").write_text('{"kind":"rank","format":99,"version":"7.1","rank":0}\n')
    with pytest.raises(NotBuilt, match=r"rank-00000.jsonl: this record has format 99, written by Sordino 7.1"):
        Reader(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "Install that version" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_has_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.jsonl").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "job.jsonl: cannot be read: Is a directory" in capsys.readouterr().err


def test_lines_of_something_else_have_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-00000.jsonl").write_text('{"kind":"step","stride":3}\n[]\n7\n')
    assert main(["report", str(tmp_path)]) == 2
    assert "a line of its files does not belong to a record" in capsys.readouterr().err


def test_a_record_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file(tmp_path, "training").close()
    assert main(["run", "--record", str(tmp_path), "-np", "1", "--", "true"]) == 2
    assert "holds the record of another run" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"cannot be written: .*; name another folder"):
        Lines(tmp_path / "job.jsonl" / "rank-00000.jsonl")


def test_the_launcher_writes_down_every_start_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told"
    script = f'echo "$SORDINO_RECORD" >> {told}; test "$SORDINO_RESTART" = 1'
    run = tmp_path / "run"
    assert main(["run", "--record", str(run), "-np", "1", "--restarts", "1", "--", "sh", "-c", script]) == 0
    assert told.read_text().split() == [str(run)] * 2
    job = Reader(run).run.job
    assert [line["number"] for line in job["start"]] == [0, 1] and [line["status"] for line in job["end"]] == [1, 0]
    found = shown(run)
    assert [event["what"] for event in found["events"]] == ["failure", "restart", "end"]
    assert "rank 0 ended with status 1" in found["events"][0]["text"] and found["summary"]["restarts"] == 1


def test_many_ranks_are_taken_together(tmp_path: Path) -> None:
    found = shown(recorded.write(tmp_path, ranks=130, steps=2))
    links, waits = found["links"], found["waits"]
    assert links["ranks"] == waits["ranks"] and len(links["ranks"]) == 44 and links["ranks"][-1] == "129"
    assert sum(map(sum, links["bytes"])) == sum(rank["bytes"] for rank in found["ranks"])


# --- Entries of ranks -------------------------------------------------------------------------------------------------


def train(folder: str, algorithm: Any, steps: int) -> None:
    context = current()
    context.record_by(Recorder(context, folder))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), algorithm=algorithm
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        hvd.record(loss=loss, odd=float("nan"))


def test_training_writes_steps_metrics_links_and_waits(tmp_path: Path) -> None:
    sim.run(3, train, str(tmp_path), "allreduce", 40)
    found = shown(tmp_path)
    assert found["summary"]["steps"] == 40 and {rank["fate"] for rank in found["ranks"]} == {"finished"}
    losses = found["metrics"]["loss"]["mean"]
    assert len(losses) == 40 and losses[-1] < losses[0] and "odd" not in found["metrics"]
    # In an all-reduce within a node each rank sends 2 (N-1)/N of the gradients, in equal parts to the other ranks.
    gradients, table = 4 * (64 * 32 + 32), found["links"]["bytes"]
    for rank in range(3):
        assert table[rank][rank] == 0 and sum(table[rank]) == pytest.approx(40 * 2 * gradients * 2 / 3, rel=0.3)
        assert table[rank][(rank + 1) % 3] == pytest.approx(table[rank][(rank + 2) % 3], rel=0.01)
    assert all(value >= 0 for name in ("exposed", "hidden", "other") for value in found["steps"][name])
    first = found["windows"][0]
    assert (first["first"], first["last"]) == (0, 32) and [row["rank"] for row in first["rows"]] == [0, 1, 2]
    assert found["facts"][0] == ["Algorithm", "AllReduce()"]


IN_BACKGROUND = "adpsgd", "scheduled-pull"
"""Algorithms that send independently of the rank's actions, so counts at two times differ."""
GOES_ON = "layered", PushSum(overlap=1), LocalSGD(interval=3, overlap=True)
"""Algorithms that send the messages of a step later, so counts differ by the messages in flight."""
SENT_AT_ONCE = [name for name in sordino.algorithms.names() if name not in (*IN_BACKGROUND, "layered")]


@pytest.mark.parametrize("algorithm", [*SENT_AT_ONCE, *GOES_ON], ids=str)
def test_what_the_script_asks_for_is_besides_the_steps(tmp_path: Path, algorithm: Any) -> None:
    """Bytes and times of steps equal the script's own measurements around its steps, to the byte, and nothing counts
    twice."""

    def work() -> tuple[list[float], float]:
        current().record_by(Recorder(current(), str(tmp_path)))
        before = hvd.stats()["bytes_sent"]
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 32))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), algorithm=algorithm
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        found = [0.0, 0.0]
        for _ in range(2):
            begin = hvd.stats()
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(4, 64)).square().mean().backward()
                optimizer.step()
            end = hvd.stats()
            found[0] += end["bytes_sent"] - begin["bytes_sent"]
            found[1] += end["exposed_seconds"] - begin["exposed_seconds"]
            hvd.synchronize(hvd.allreduce_async(torch.ones(500), name="asked for"))
            hvd.average_parameters(model)
            for _ in range(3):
                hvd.allreduce(torch.ones(3), name="small")
        optimizer.flush()
        return found, hvd.stats()["bytes_sent"] - before

    told = sim.run(4, work)
    for rank, ((sent, exposed), everything) in enumerate(told):
        lines = Reader(tmp_path).run.ranks[rank].lines
        steps, besides = lines["step"], lines["besides"]
        assert len(steps) == 12 and {line["step"] for line in besides} == {0, 6, 12}
        assert sum(sum(line["sent"].values()) for line in steps + besides) == everything
        if algorithm in SENT_AT_ONCE:
            assert sum(sum(line["sent"].values()) for line in steps) == sent
            assert sum(line["exposed"] for line in steps) == pytest.approx(exposed, abs=1e-5)
    found = shown(tmp_path)["summary"]
    assert 12 * found["bytes"] + found["besides"]["bytes"] == pytest.approx(sum(sent for _, sent in told) / 4)


def test_a_step_lasts_without_the_evaluation_before_it(tmp_path: Path) -> None:
    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        weight = torch.nn.Parameter(torch.ones(10))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            hvd.allreduce(torch.ones(1), name="of the step")  # gradients are there, so this is no evaluation
            optimizer.step()
            if step == 1:
                time.sleep(0.2)
                hvd.allreduce(torch.ones(1), name="right")

    sim.run(2, work)
    for rank in Reader(tmp_path).run.ranks.values():
        assert [line["step"] for line in rank.of("besides")] == [0, 2]
        assert rank.of("besides")[1]["seconds"] > 0.2 and rank.of("besides")[1]["calls"] == 1
        assert sum(line["seconds"] for line in rank.of("step")) > 0
        spans = {line["step"]: [span for span in line["spans"] if span[0] == "besides"] for line in rank.of("spans")}
        assert [len(spans[step]) for step in (1, 2, 3)] == [0, 0, 1]
        began, ended = spans[3][0][1:3]
        assert ended - began == pytest.approx(rank.of("besides")[1]["seconds"], abs=1e-5)
        last = rank.of("step")[2]
        assert last["seconds"] == pytest.approx(last["time"] - ended, abs=1e-5)


def test_what_an_unfinished_step_sent_is_told(tmp_path: Path) -> None:
    def work() -> float:
        current().record_by(Recorder(current(), str(tmp_path)))
        before = hvd.stats()["bytes_sent"]
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight.square().sum().backward()
        return hvd.stats()["bytes_sent"] - before

    for rank, everything in enumerate(sim.run(2, work)):
        lines = Reader(tmp_path).run.ranks[rank].lines
        assert [line["step"] for line in lines["step"]] == [1] and [line["step"] for line in lines["besides"]] == [0, 1]
        assert sum(sum(line["sent"].values()) for line in lines["step"] + lines["besides"]) == everything


def test_normalization_over_ranks_is_of_the_step(tmp_path: Path) -> None:
    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        model = hvd.SyncBatchNorm(3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()

    sim.run(2, work)
    assert {line["step"] for line in Reader(tmp_path).run.ranks[0].of("besides")} == {0}


def test_bytes_by_rank_add_up_to_what_was_sent(tmp_path: Path) -> None:
    def work() -> tuple[float, float]:
        context = current()
        context.world.open_ledger()
        before = hvd.stats()["bytes_sent"]
        hvd.allreduce(torch.ones(1000), name="a")
        hvd.allgather(torch.ones(10 + hvd.rank()), name="b")
        hvd.broadcast(torch.ones(77), root_rank=1, name="c")
        for _ in range(3):
            hvd.allreduce(torch.ones(3), name="again")
        return hvd.stats()["bytes_sent"] - before, sum(context.world.take_ledger()[1])

    for sent, by_rank in sim.run(4, work, ranks_per_node=2):
        assert sent == by_rank > 0


@pytest.mark.parametrize("algorithm", ["allreduce", "dpsgd"])
def test_waits_are_for_the_rank_that_comes_last(tmp_path: Path, algorithm: str) -> None:
    """Rank 1 is last in each operation, and the others wait for it: with agreements (all-reduce) and without."""
    arrived = [threading.Semaphore(0) for _ in range(10)]

    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), algorithm=algorithm)
        for step in arrived:
            if hvd.rank() == 1:
                for _ in range(2):
                    assert step.acquire(timeout=60)
                time.sleep(0.01)
            else:
                step.release()
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

    sim.run(3, work)
    waits = shown(tmp_path)["waits"]["seconds"]
    assert waits[0][1] > waits[0][2] and waits[2][1] > waits[2][0], waits
    assert waits[0][1] + waits[2][1] > 2 * sum(waits[1]), waits  # other ranks are late, too, on a busy machine


def test_a_recovery_is_told_and_counting_goes_on(tmp_path: Path) -> None:
    """Rank 0 is lost. The two remaining ranks have other numbers in the new world, but keep theirs in the record."""
    network = SimNetwork([0, 0, 0])

    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.01))
        for step in range(6):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            if step == 2 and current().identity == 0:
                network.kill(0)

    sim.run(3, work, on_peer_lost="continue", network=network)
    found = shown(tmp_path)
    told = [event for event in found["events"] if event["what"] == "recovery"]
    assert {event["who"] for event in told} == {"rank 1", "rank 2"}
    assert all("Continued without 0 in epoch 1, 2 ranks" in event["text"] for event in told)
    assert [(rank["rank"], rank["steps"]) for rank in found["ranks"]][1:] == [(1, 6), (2, 6)]
    table = found["links"]["bytes"]
    assert table[1][2] > table[1][0] > 0


def test_helpers_are_among_the_links(tmp_path: Path) -> None:
    algorithm = Layered(communicator="rank")
    sim.run(3, train, str(tmp_path), algorithm, 5, algorithm=algorithm)
    links = shown(tmp_path)["links"]
    assert links["ranks"] == ["0", "1"] and links["columns"] == ["0", "1", "helper 2"]
    # Nothing uses the results of the last step, so it may still be in flight when the record ends.
    assert max(map(max, links["bytes"])) > 4 * 4 * (64 * 32 + 32)


def test_pulls_have_ages(tmp_path: Path) -> None:
    sim.run(2, train, str(tmp_path), ScheduledPull(interval=1), 12)
    found = shown(tmp_path)
    assert found["ages"]["step"] and all(age >= 0 for age in found["ages"]["low"])
    assert {"pull"} <= {span[0] for row in found["windows"][0]["rows"] for span in row["spans"]}


def test_skipping_has_a_map(tmp_path: Path) -> None:
    sim.run(2, train, str(tmp_path), CaPS(statistics_interval=5), 20)
    found = shown(tmp_path)["skips"]
    assert sorted(found["names"]) == ["bias", "weight"] and found["step"] == [5, 10, 15, 20]


def test_skipping_of_a_tensor_that_is_unfrozen(tmp_path: Path) -> None:
    """The tensor comes before others in the model, which keep their earlier points."""

    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        weights = {name: torch.nn.Parameter(torch.ones(4)) for name in "abc"}
        weights["b"].requires_grad_(False)
        sgd = torch.optim.SGD(weights.values(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, weights.items(), algorithm=CaPS(statistics_interval=1))
        for step in range(4):
            weights["b"].requires_grad_(step >= 2)
            optimizer.zero_grad()
            sum(weight.square().sum() for weight in weights.values() if weight.requires_grad).backward()
            optimizer.step()

    sim.run(2, work)
    found = shown(tmp_path)["skips"]
    unchanged = dict(zip(found["names"], found["unchanged"], strict=True))
    assert found["step"] == [1, 2, 3, 4] and unchanged["b"][:2] == [None, None]
    assert None not in [*unchanged["a"], *unchanged["b"][2:], *unchanged["c"]]


def test_without_a_record_nothing_is_counted_and_record_does_nothing() -> None:
    def work() -> list[int]:
        hvd.record(loss="no number")
        hvd.allreduce(torch.ones(8))
        return current().world.take_ledger()[1]

    assert sim.run(2, work) == [[], []]


def test_what_a_record_costs_ends_with_it(tmp_path: Path) -> None:
    def work() -> None:
        context = current()
        recorder = Recorder(context, str(tmp_path))
        hvd.allreduce(torch.ones(8))
        recorder.close()
        before = context.world.take_ledger()
        hvd.allreduce(torch.ones(8))
        after = context.world.take_ledger()
        assert sum(before[1]) > 0 and before[:2] == after[:2] and after[2] == []

    sim.run(2, work)


def test_a_metric_is_one_number(tmp_path: Path) -> None:
    def work() -> None:
        current().record_by(Recorder(current(), str(tmp_path)))
        for wrong in (torch.ones(2), "high", None):
            with pytest.raises(UsageError, match=r"record\(loss=.*must be one number"):
                hvd.record(loss=wrong)

    sim.run(1, work)


def test_a_full_disk_ends_the_record_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    file = Lines(Path("/dev/full"))
    file.write("step", step=1)
    file.write("step", step=2)
    assert caplog.messages == ["the record /dev/full ends here: No space left on device"]


SIMULATED = ["adpsgd", "--slow", "1:3"], ["allreduce"], ["scheduled-pull", "--set", "overlap=naive"]


@pytest.mark.parametrize("words", SIMULATED, ids=" ".join)
def test_simulations_write_the_same(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    base = [
        "simulate",
        "--workers",
        "3",
        "--data",
        "none",
        "--steps",
        "40",
        "--message-mib",
        "1",
        "--quiet",
        "--processes",
        "1",
    ]
    assert main([*base, "--record", str(run), "--json", str(tmp_path / "x.json"), "--algorithm", *words]) == 0
    found, told = shown(run), json.loads((tmp_path / "x.json").read_text())["runs"][0]
    assert found["virtual"] and found["summary"]["ranks"] == 3 and found["metrics"]["distance"]["mean"]
    assert sum(map(sum, found["links"]["bytes"])) == pytest.approx(3 * told["bytes"])
    steps = found["steps"]
    assert found["windows"][0]["label"].endswith(" virtual s") and len(steps["time"]) > 20 and steps["hidden"] == []
    assert steps["time"] == sorted(steps["time"]) and steps["time"][-1] == pytest.approx(told["seconds"], rel=0.1)
    assert found["summary"]["whole"]["bytes"] == pytest.approx(told["bytes"])
    assert found["summary"]["whole"]["exposed"] == pytest.approx(told["waiting"])
    if words[0] != "allreduce":
        assert found["ages"]["behind"] == [] and 0 < min(found["ages"]["mean"]) <= max(found["ages"]["high"])
        assert found["summary"]["age"] == pytest.approx(told["age"])
    else:
        assert found["missing"]["ages"].startswith("No ages were recorded")
    page([found])


def test_a_death_after_the_end_of_a_simulation_has_not_happened(tmp_path: Path) -> None:
    words = ["simulate", "--algorithm", "adpsgd", "--workers", "3", "--data", "none", "--steps", "9", "--quiet"]
    assert main([*words, "--processes", "1", "--kill", "2@100", "--record", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "rank-00002.jsonl").read_text().splitlines()[-1])["kind"] == "end"


def test_of_many_workers_the_first_are_shown(tmp_path: Path) -> None:
    words = ["simulate", "--workers", "70", "--data", "none", "--steps", "5", "--message-mib", "1", "--quiet"]
    run = tmp_path / "run"
    assert main([*words, "--processes", "1", "--algorithm", "push-sum", "--record", str(run)]) == 0
    found = shown(run)
    assert found["notes"] == ["The first 64 of 70 workers are shown."] and found["summary"]["bytes"] > 2**20
    assert found["links"]["columns"][-1] == "all others"


# --- The page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("runs")
    recorded.write(place / "<b>@DATA@&<!--<script>", ranks=2, steps=40)
    recorded.write(place / "caps", "CaPS()", skips=True, ages=True)
    return page([contents(reader) for reader in readers([place])])


def test_the_page_fetches_nothing(everything: str) -> None:
    assert "http://" not in everything and "https://" not in everything and "//cdn" not in everything
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:,")""", everything)
    assert "@import" not in everything and not re.findall(r"url\((?!#)", everything)
    assert "default-src &#x27;none&#x27;" in everything and "connect-src &#x27;none&#x27;" in everything


def test_the_policy_names_the_scripts_and_styles_that_there_are(everything: str) -> None:
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", everything, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src &#x27;sha256-{digest}&#x27;" in everything
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
        assert dangerous not in everything


def test_names_cannot_leave_the_data(everything: str) -> None:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', everything, re.DOTALL)
    assert [run["name"] for run in json.loads(data)["runs"]] == ["<b>@DATA@&<!--<script>", "caps"]
    assert everything.count("</script>") == 2 and "<" not in embedded({"a": "<!--<script>"})


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_colours_stand_out_in_light_and_dark() -> None:
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in
                   re.findall(r":root \{(.*?)\}", asset("style.css"), re.DOTALL)[:2])  # fmt: skip
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ground in ("ground", "panel"):
            for text in ("text", "quiet", "focus", "bad"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours)
            for line in ("axis", "c0", "c1", "c2", "c3", "c4", "c5", "wait", "move", "pull"):
                assert contrast(colours[line], colours[ground]) >= 3, (line, ground, colours)
        levels = [luminance(colours[f"h{number}"]) for number in range(8)]
        assert levels in (sorted(levels), sorted(levels, reverse=True))


# --- Server -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer([Reader(recorded.write(tmp_path / "run", ranks=2, steps=8))]) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, host: str | None = None) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_only_the_whole_address_on_this_machine_is_answered(server: LiveServer) -> None:
    path = urlsplit(server.address).path
    assert server.server_address[0] == "127.0.0.1" and len(path) > 30
    answer, text = ask(server, path)
    assert answer.status == 200 and "connect-src &#x27;self&#x27;" in text
    told = answer.getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in told and "frame-ancestors 'none'" in told
    assert answer.getheader("Referrer-Policy") == "no-referrer" and answer.getheader("Cache-Control") == "no-store"
    for wrong in ("/", path[:-2] + "/", "/x" + path, path + "../", path + "rank-00000.jsonl", "//", "*"):
        assert ask(server, wrong)[0].status == 404, wrong
    assert ask(server, path, host="evil.example")[0].status == 404


def test_news_are_served_as_a_run_goes_on(server: LiveServer, tmp_path: Path) -> None:
    news = urlsplit(server.address).path + "data.json"
    assert json.loads(ask(server, news)[1])["runs"][0]["summary"]["steps"] == 8
    recorded.write(tmp_path / "more", ranks=2, steps=10)
    lines = (tmp_path / "more" / "rank-00000.jsonl").read_text().splitlines()
    with open(tmp_path / "run" / "rank-00000.jsonl", "a") as file:
        file.write("\n".join(line for line in lines if '"step": 10' in line) + "\n")
    assert json.loads(ask(server, news)[1])["runs"][0]["summary"]["steps"] == 10
