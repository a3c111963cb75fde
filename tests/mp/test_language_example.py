"""The example of a language model: its text, its optimizers, its loss on any number of ranks, refused options."""

from __future__ import annotations

import copy
import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from algorithm_table import has

import language
import sordino.torch as hvd
from laboratory.gpt import GPT, MuonWithAdamW, loss_of, optimizer_of
from laboratory.text import Batches, count_sequences, is_held_out, load_text, sequences
from sordino import sim
from sordino.algorithms import names, resolve
from sordino.errors import UsageError
from sordino.launcher import mpi

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150
STEPS, BATCH, CONTEXT = 12, 6, 16
SMALL = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--context", str(CONTEXT), "--batch", str(BATCH)),
    *("--tokens", str(STEPS * BATCH * CONTEXT), "--evaluate-every", "4", "--validation-tokens", "512", "--lr", "0.01"),
]
HELD_OUT = ("15.txt", "39.txt")  # of the names 0.txt to 39.txt
"""Files of `text` that are held out, in every version."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 40 files of text."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"{number} times {k} is {number * k}.\n" for k in range(40)))
    return str(folder)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads, which the example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(size: int, folder: Path, text: str, *options: str) -> dict[str, Any]:
    """Train on `size` ranks, which are threads. Return the contents of the JSON file."""
    file = folder / "curve.json"
    file.unlink(missing_ok=True)
    assert sim.run(size, language.main, [*SMALL, "--text", text, "--json", str(file), *options]) == [0] * size
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def losses(results: dict[str, Any]) -> list[float]:
    return [point["loss"] for point in results["curve"]]


@pytest.fixture(scope="module")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(1, tmp_path_factory.mktemp("alone"), text)


# ---- the whole program -------------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_file_has_the_curve_and_all_settings(alone: dict[str, Any]) -> None:
    assert [point["step"] for point in alone["curve"]] == [0, 4, 8, 12]
    for point in alone["curve"]:
        assert set(point) == {"step", "tokens", "loss", "sent_bytes", "seconds"}
        assert point["tokens"] == point["step"] * BATCH * CONTEXT and point["sent_bytes"] == 0
    assert losses(alone)[0] == pytest.approx(math.log(256), abs=0.05)  # it knows nothing yet
    assert losses(alone)[-1] < losses(alone)[0] - 0.5
    settings = alone["settings"]
    assert settings["steps"] == STEPS and settings["world_size"] == 1 and settings["written"] == "AllReduce()"
    assert settings["parameters"] == 12 * 16**2 + (256 + CONTEXT) * 16 + 3 * 16
    assert settings["validation_sequences"] == 512 // CONTEXT
    assert {"algorithm", "set", "optimizer", "lr", "batch", "tokens", "seed", "text_sha256"} <= settings.keys()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_divide_the_batch_learn_the_same(
    launcher: mpi.Launcher, alone: dict[str, Any], text: str, tmp_path: Path, ranks: int
) -> None:
    """Ranks are real processes. The order in which gradients are summed differs."""
    options = [*SMALL, "--text", text, "--json", str(tmp_path / "curve.json")]
    command = [*forked.python(), str(ROOT / "examples" / "language.py"), *options]
    words = mpi.command_line(launcher, mpi.Job(ranks, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "curve.json").read_text())
    assert losses(found) == pytest.approx(losses(alone), abs=1e-4)
    assert found["settings"]["text_sha256"] == alone["settings"]["text_sha256"]
    gradients = 4 * alone["settings"]["parameters"] * STEPS  # of float32
    assert 0.4 * gradients < found["curve"][-1]["sent_bytes"] < 2.5 * gradients
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(found["curve"])  # only rank 0 prints
    nats = found["curve"][-1]["loss"]
    assert f"step 12/12  1,152 tokens  loss {nats:.4f} nats ({nats / math.log(2):.4f} bits) per byte" in lines[-1]


@pytest.mark.parametrize("options", [[], ["--algorithm", "diloco", "--set", "interval=4", "--optimizer", "muon"]])
def test_the_same_command_gives_the_same_loss(text: str, tmp_path: Path, options: list[str]) -> None:
    first, second = (losses(trained(2, tmp_path, text, *options)) for _ in range(2))
    assert first == second and losses(trained(2, tmp_path, text, *options, "--seed", "2")) != first


def test_outer_parameters_are_evaluated(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outer parameters change only in outer steps."""
    found = losses(trained(2, tmp_path, text, "--algorithm", "diloco", "--set", "interval=8"))
    assert found[0] == found[1] and found[1] - found[2] > 0.1 and found[2] == found[3]
    assert "note: 12 steps are not a multiple of interval=8, so the outer parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", names())
def test_every_algorithm_learns(name: str, text: str, tmp_path: Path) -> None:
    interval = ["--set", "interval=2"] if has(resolve(name), "interval") else []
    found = losses(trained(2, tmp_path, text, "--algorithm", name, *interval))
    assert found[-1] < found[0] - 0.2  # sparse-loco, which sends 2 % of a change, falls least


@pytest.mark.parametrize(
    "options", [["--algorithm", "crossover"], ["--algorithm", "noloco", "--set", "interval=4"], []], ids=str
)
def test_encoded_values_cost_little(options: list[str], text: str, tmp_path: Path) -> None:
    """The loss is about the same with encoded parameters of gossip, and with encoded gradients."""
    exact = trained(2, tmp_path, text, *options)
    encoded = trained(2, tmp_path, text, *options, "--compression", "int8")
    assert losses(encoded)[-1] == pytest.approx(losses(exact)[-1], abs=0.05)
    assert "Int8" in encoded["settings"]["written"] or not options


def mean_and_recommended(
    text: str, options: list[str], steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the mean of the ranks' models, in float64, and the model that the example evaluates."""
    hvd.init()
    training = language.prepare([*SMALL, "--text", text, *options])
    for number in range(steps):
        training.step(number)
    with training.optimizer.outer_parameters() if training.has_outer else nullcontext():
        own = {name: value.detach().double() for name, value in training.model.named_parameters()}
    models: list[dict[str, torch.Tensor]] = hvd.allgather_object(own, name="test.models")
    assert any(not models[0][name].equal(models[-1][name]) for name in own)
    return {name: torch.stack([one[name] for one in models]).mean(0) for name in own}, training.recommended()


@pytest.mark.parametrize(
    ("options", "steps", "ranks"),
    [
        (["--algorithm", "local-sgd", "--set", "interval=4"], 2, 2),
        # After one outer step in pairs, the pairs have different outer parameters.
        (["--algorithm", "noloco", "--set", "interval=2", "--batch", "8"], 3, 4),
    ],
    ids=["models", "outer parameters"],
)
def test_the_mean_of_different_models_is_evaluated(text: str, options: list[str], steps: int, ranks: int) -> None:
    for wanted, found in sim.run(ranks, mean_and_recommended, text, options, steps):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)


# ---- text ----------------------------------------------------------------------------------------------------------


def test_the_same_files_are_held_out_always(text: str, tmp_path: Path) -> None:
    found = load_text(text)
    assert found.held_out_files == HELD_OUT and is_held_out("15.txt") and not is_held_out("14.txt")
    assert len(found.train_files) == 38 and not set(found.train_files) & set(HELD_OUT)
    parts = [(Path(text) / name).read_bytes() + b"\0" for name in found.train_files]
    assert found.train.numpy().tobytes() == b"".join(parts) and list(found.train_files) == sorted(found.train_files)
    assert found.sha256() == load_text(text).sha256()
    for name in (*HELD_OUT, "0.txt", "more/1.txt", ".hidden", ".git/config", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else name)
    fewer = load_text(str(tmp_path))
    assert fewer.held_out_files == HELD_OUT and fewer.train_files == ("0.txt", "more/1.txt")


def test_the_standard_library_is_enough_to_train_on() -> None:
    found = load_text(None)
    assert len(found.train) > 4_000_000 and 0.01 < len(found.held_out) / len(found.train) < 0.15
    assert "argparse.py" in {*found.train_files, *found.held_out_files}
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in found.train_files)
    assert not set(found.train_files) & set(found.held_out_files)


def test_ranks_divide_every_batch_of_an_epoch() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    count = count_sequences(data, 4)
    assert count == 62  # 62 * 4 targets; the last byte of 250 is left out
    batches, seen = Batches(data, 4, 6, seed=3), []
    for step in range(count // 6):
        whole = batches.rows(step, 0, 1)
        for size in (2, 3, 6):
            assert torch.cat([batches.rows(step, rank, size) for rank in range(size)]).equal(whole)
            assert {len(batches.rows(step, rank, size)) for rank in range(size)} == {6 // size}
        seen += whole.tolist()
    assert len(seen) == len(set(seen)) == 60 and set(seen) <= set(range(62))
    next_epoch = torch.cat([batches.rows(step, 0, 1) for step in range(10, 20)]).tolist()
    assert len(set(next_epoch)) == 60 and next_epoch != seen
    assert batches.rows(0, 0, 1).tolist() == seen[:6]  # also when asked again
    assert not Batches(data, 4, 6, seed=4).rows(0, 0, 1).equal(batches.rows(0, 0, 1))


def test_a_target_is_the_next_byte() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    rows = sequences(data, torch.tensor([0, 61]), 4)
    assert rows.tolist() == [[0, 1, 2, 3, 4], [244, 245, 246, 247, 248]]


# ---- model and optimizer -------------------------------------------------------------------------------------------


def test_a_byte_is_predicted_from_earlier_ones_only() -> None:
    torch.manual_seed(1)
    model = GPT(layers=2, width=16, heads=2, context=8).double()
    inputs = torch.randint(256, (3, 8))
    other = inputs.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    before, after = model(inputs), model(other)
    assert before[:, :5].equal(after[:, :5]) and not before[:, 5:].isclose(after[:, 5:]).all(-1).any()


def test_the_loss_is_the_cross_entropy_in_nats() -> None:
    logits, targets = torch.randn(2, 3, 256, dtype=torch.float64), torch.randint(256, (2, 3))
    wanted = -logits.softmax(-1).log().gather(-1, targets[..., None])
    assert loss_of(logits, targets).item() == pytest.approx(wanted.mean().item(), rel=1e-5)
    assert loss_of(logits, targets, "sum").item() == pytest.approx(wanted.sum().item(), rel=1e-5)


def losses_of_a_step(text: str) -> tuple[float, float]:
    """Return the loss that the first step trains on, and the mean of -log p(next byte) in float64."""
    hvd.init()
    training = language.prepare([*SMALL, "--text", text])
    rows = training.batches.sequences(0, hvd.rank(), hvd.size())
    with torch.no_grad():
        chances = copy.deepcopy(training.model).double()(rows[:, :CONTEXT]).softmax(-1)
    wanted = [-math.log(chances[row, at, rows[row, at + 1]]) for row in range(len(rows)) for at in range(CONTEXT)]
    assert len(wanted) == BATCH * CONTEXT // hvd.size()
    return training.step(0), sum(wanted) / len(wanted)


def test_a_step_trains_on_every_next_byte(text: str) -> None:
    for found, wanted in sim.run(2, losses_of_a_step, text):
        assert found == pytest.approx(wanted, rel=1e-6)


def set_gradients(model: GPT, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_steps_the_matrices_of_the_blocks_and_adamw_all_others() -> None:
    torch.manual_seed(1)
    model = GPT(layers=2, width=16, heads=2, context=8)
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(model, "muon", 0.01, 0.1)
    blocks = [(name.startswith("blocks.") and one.dim() == 2, one) for name, one in twin.named_parameters()]
    matrices = [one for inside, one in blocks if inside]
    decaying = [one for inside, one in blocks if not inside and one.dim() == 2]
    vectors = [one for _, one in blocks if one.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(4):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / (step + 1)
        set_gradients(model, step)
        set_gradients(twin, step)
        optimizer.step()
        muon.step()
        adamw.step()
        if step == 1:  # a new optimizer continues from the state
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(model, "muon", 0.5, 0.5)
            optimizer.load_state_dict(state)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.equal(other)
    assert isinstance(optimizer, MuonWithAdamW) and len(optimizer.state) == len(list(model.parameters()))


def test_the_rate_rises_and_falls() -> None:
    rates = [language.rate(2.0, step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0 == max(rates)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.2, rel=1e-2)
    assert language.rate(2.0, 0, 1) == 2.0


# ---- refused options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--algorithm", "telepathy"], "--algorithm telepathy: unknown; use one of adpsgd, allreduce"),
        (["--set", "group_size=2"], "--set group_size=2: allreduce has no setting group_size; it has: bucket_bytes"),
        (["--compression", "int5"], "int5': there is no such codec"),
        (["--algorithm", "crossover", "--compression", "sign"], "Use one of Int8, Int4, Float16, BFloat16"),
        (["--algorithm", "push-sum", "--compression", "int8"], "compression= has no effect: PushSum without groups"),
        (
            ["--algorithm", "noloco", "--compression", "int8", "--set", "compression=int4"],
            "--compression int8 and --set compression=... are the same",
        ),
        (["--batch", "7"], "--batch 7: 2 ranks cannot divide it into equal parts. Use a multiple of 2, such as 8"),
        (["--tokens", "95"], "--tokens 95: less than one step, which takes 96 tokens (--batch times --context)"),
        (["--heads", "3"], "--width 16: must be a multiple of --heads 3"),
        (["--layers", "0"], "--layers 0: must be 1 or more"),
        (["--lr", "0"], "--lr must be above 0"),
        (["--optimizer", "sgd"], "--optimizer: invalid choice: 'sgd'"),
        (["--text", "no-such-folder"], "--text no-such-folder: there is no folder no-such-folder"),
        (["--json", "no-such-folder/c.json"], "--json no-such-folder/c.json: there is no folder"),
        (["--context", "4000", "--tokens", "1_000_000"], "bytes has no sequence of --context 4000. Use more text"),
        (["--batch", "20000", "--tokens", "1_000_000"], "is less than --batch 20000"),
        (["--algorithm", "local-sgd", "--set", "group_size=2", "--optimizer", "muon"], "element-wise optimizer. Known"),
    ],
)
def test_nonsense_is_refused_once(
    options: list[str], complaint: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim.run(2, language.main, [*SMALL, "--text", text, *options]) == [2, 2]
    errors = capsys.readouterr().err
    assert errors.count(complaint) == 1 and errors.startswith("language.py: error: ")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no text: every file below this folder is empty or hidden"):
        load_text(str(tmp_path))
    (tmp_path / "book.txt").write_text("once upon a time")
    with pytest.raises(UsageError, match=r"no file to hold out for validation among its 1 files.*split -b 64k"):
        load_text(str(tmp_path))


def prepared_on(texts: list[str]) -> str:
    hvd.init()
    with pytest.raises(UsageError) as refused:
        language.prepare([*SMALL, "--text", texts[hvd.rank()]])
    return str(refused.value)


def test_ranks_with_different_texts_are_refused(text: str, tmp_path: Path) -> None:
    for name in ("0.txt", HELD_OUT[0]):
        (tmp_path / name).write_text("another text " * 100)
    found = sim.run(3, prepared_on, [text, text, str(tmp_path)])
    assert all(message.startswith("rank 2 has another text than rank 0") for message in found)
