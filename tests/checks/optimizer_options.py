"""The arguments of DistributedOptimizer."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from checks.adasum import model as adasum_model
from checks.agreement import raises
from checks.models import MANY, batch, loss_of, make_model, part
from checks.registry import Seat, check
from checks.training import ROWS, Twins, sgd
from sordino.algorithms import AllReduce, names
from sordino.errors import UsageError


@check(passes=(2, 3), set_to_none=(True, False))
def backward_passes_per_step(seat: Seat, passes: int, set_to_none: bool) -> None:
    """Gradients of the passes are summed, not averaged."""
    twins = Twins(seat, backward_passes_per_step=passes)
    for _ in range(3):
        twins.zero(set_to_none=set_to_none)
        for _ in range(passes):
            twins.backward()
        twins.step()
    twins.check()


@check()
def fewer_passes_than_promised(seat: Seat) -> None:
    """step() reduces the gradients of the passes that were made."""
    twins = Twins(seat, backward_passes_per_step=3)
    for passes in (3, 1, 2, 3):
        twins.zero()
        for _ in range(passes):
            twins.backward()
        twins.step()
    twins.check()


@check()
def set_backward_passes_per_step(seat: Seat) -> None:
    twins = Twins(seat)
    twins.train(2)
    for passes in (2, 1, 3):
        twins.optimizer.set_backward_passes_per_step(passes)
        for _ in range(2):
            twins.zero()
            for _ in range(passes):
                twins.backward()
            twins.step()
    twins.check()
    raises(ValueError, "0", twins.optimizer.set_backward_passes_per_step, 0)


@check(factor=(2.0, 0.5, 3.0))
def gradient_predivide_factor(seat: Seat, factor: float) -> None:
    twins = Twins(seat, gradient_predivide_factor=factor)
    twins.train(3)
    twins.check()


@check(groups=(1, 2, 3, 4, 100))
def a_number_of_groups(seat: Seat, groups: int) -> None:
    twins = Twins(seat, groups=groups)
    twins.train(3)
    twins.train(3, set_to_none=False)
    twins.check()


@check()
def num_groups(seat: Seat) -> None:
    twins = Twins(seat, num_groups=2)
    twins.train(3)
    twins.check()


@check()
def lists_of_parameters(seat: Seat) -> None:
    model = make_model("small", 3)
    weights = [p for p in model.parameters() if p.dim() > 1]
    parameters = list(model.parameters())
    for groups in ([weights], [[parameters[3], parameters[0]], [parameters[1]]], [[], weights], [parameters]):
        twins = Twins(seat, make=lambda m: sgd(m))
        mapping = dict(zip(map(id, parameters), twins.model.parameters()))
        translated = [[mapping[id(p)] for p in group] for group in groups]
        twins.optimizer = None
        twins.optimizer = hvd.DistributedOptimizer(twins.plain, twins.model.named_parameters(), groups=translated)
        twins.train(3)
        twins.check()


@check(compression=("fp16", "bf16"), dtype=(torch.float32, torch.float64))
def compressed(seat: Seat, compression: str, dtype: torch.dtype) -> None:
    twins = Twins(seat, dtype=dtype, compression=getattr(hvd.Compression, compression))
    twins.train(3)
    twins.train(3, set_to_none=False)
    assert next(twins.model.parameters()).grad.dtype == dtype
    twins.check(2e-2)


@check(op=("Sum", "Min", "Max"))
def other_reductions(seat: Seat, op: str) -> None:
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), op=getattr(hvd, op))
    for turn in range(3):
        optimizer.zero_grad(set_to_none=turn < 1)
        whole = batch(ROWS * seat.size, turn)
        gradients = []
        for rank in range(seat.size):
            loss = loss_of(model, *part(whole, rank, seat.size))
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        loss_of(model, *part(whole, seat.rank, seat.size)).backward()
        optimizer.step()
        for parameter, parts in zip(model.parameters(), zip(*gradients)):
            stack = torch.stack(parts)
            wanted = {"Sum": stack.sum(0), "Min": stack.amin(0), "Max": stack.amax(0)}[op]
            torch.testing.assert_close(parameter.grad, wanted, atol=1e-12, rtol=1e-12)
            seat.same("parameter", parameter)


@check(label=("SGD", "momentum", "AdamW", "two groups"))
def adasum(seat: Seat, label: str) -> None:
    """Every rank steps alone; then each parameter moves by the Adasum of all ranks' steps."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(MANY[label](model), model.named_parameters(), op=hvd.Adasum)
    others = [make_model("small", 3) for _ in range(seat.size)]
    plain = [MANY[label](other) for other in others]
    for turn in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        whole = batch(ROWS * seat.size, turn)
        optimizer.zero_grad()
        loss_of(model, *part(whole, seat.rank, seat.size)).backward()
        optimizer.step()
        changes = []
        for rank, (other, stepper) in enumerate(zip(others, plain)):
            stepper.zero_grad()
            loss_of(other, *part(whole, rank, seat.size)).backward()
            stepper.step()
            changes.append([parameter.detach() - start for parameter, start in zip(other.parameters(), before)])
        for index, (parameter, start) in enumerate(zip(model.parameters(), before)):
            wanted = start + adasum_model([change[index] for change in changes])
            torch.testing.assert_close(parameter.detach(), wanted, atol=1e-10, rtol=1e-10)
            seat.same("parameter", parameter)
            for other in others:
                with torch.no_grad():
                    list(other.parameters())[index].copy_(wanted)


@check(least=2)
def adasum_with_a_scaler(seat: Seat) -> None:
    """A rank whose gradients are infinite takes part with changes of 0, so that no rank waits for it."""
    model, others = make_model("small", 3), [make_model("small", 3) for _ in range(seat.size)]
    plain = [(other, sgd(other)) for other in others]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for turn in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        whole, infinite = batch(ROWS * seat.size, turn), turn == 1
        scaler.scale(loss_of(model, *part(whole, seat.rank, seat.size))).backward()
        if infinite and seat.rank == seat.last:
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        if turn == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changes = []
        for rank, (other, stepper) in enumerate(plain):
            for parameter, start in zip(other.parameters(), before):
                parameter.data.copy_(start)
            loss_of(other, *part(whole, rank, seat.size)).backward()
            if not (infinite and rank == seat.last):
                stepper.step()
            stepper.zero_grad()
            changes.append([parameter.detach() - start for parameter, start in zip(other.parameters(), before)])
        for index, (parameter, start) in enumerate(zip(model.parameters(), before)):
            wanted = start + adasum_model([change[index] for change in changes])
            torch.testing.assert_close(parameter.detach(), wanted, atol=1e-10, rtol=1e-10)
    assert scaler.get_scale() == (2.0 if seat.rank == seat.last else 4.0)


@check(least=2)
def adasum_refuses(seat: Seat) -> None:
    model = make_model("small", 3)
    some = hvd.add_process_set([0])
    raises(UsageError, "process set", hvd.DistributedOptimizer, sgd(model), op=hvd.Adasum, process_set=some)
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    try:
        with optimizer.skip_synchronize():
            raise RuntimeError("not reached")
    except AssertionError as error:
        assert "Adasum" in str(error)
    hvd.remove_process_set(some)


@check(least=2)
def process_sets_train_apart(seat: Seat) -> None:
    even, odd = hvd.add_process_set(list(range(0, seat.size, 2))), hvd.add_process_set(list(range(1, seat.size, 2)))
    mine = even if even.included() else odd
    model, twin = make_model("small", 3), make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=mine)
    reference = sgd(twin)
    for turn in range(3):
        whole = batch(ROWS * seat.size, turn)
        parts = [part(whole, rank, seat.size) for rank in mine.ranks]
        for chosen, stepper, data in (
            (model, optimizer, part(whole, seat.rank, seat.size)),
            (twin, reference, [torch.cat(column) for column in zip(*parts)]),
        ):
            stepper.zero_grad()
            loss_of(chosen, *data).backward()
            stepper.step()
    for here, there in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(here, there, atol=1e-11, rtol=1e-11)
    hvd.remove_process_set(odd)
    hvd.remove_process_set(even)


@check(least=3)
def those_outside_a_set_train_alone(seat: Seat) -> None:
    pair = hvd.add_process_set([0, 1])
    model, twin = make_model("small", 3), make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), process_set=pair)
    reference = sgd(twin)
    for turn in range(2):
        data = part(batch(ROWS * seat.size, turn), seat.rank, seat.size)
        for chosen, stepper in ((model, optimizer), (twin, reference)):
            stepper.zero_grad()
            loss_of(chosen, *data).backward()
            stepper.step()
    alike = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert alike == (not pair.included())
    hvd.remove_process_set(pair)


@check(algorithm=(None, "allreduce", "instance", "tiny segments"))
def algorithms(seat: Seat, algorithm: str | None) -> None:
    instances = {"instance": AllReduce(), "tiny segments": AllReduce(bucket_bytes=1)}
    twins = Twins(seat, algorithm=instances.get(algorithm, algorithm))
    twins.train(3)
    twins.train(3, set_to_none=False)
    twins.check()


@check()
def algorithms_that_do_not_exist(seat: Seat) -> None:
    model = make_model("small", 3)
    raises(UsageError, "allreduce", hvd.DistributedOptimizer, sgd(model), algorithm="alreduce")
    raises(UsageError, "alreduce", hvd.DistributedOptimizer, sgd(model), algorithm="alreduce")
    raises(UsageError, "int", hvd.DistributedOptimizer, sgd(model), algorithm=3)
    raises(UsageError, "", hvd.DistributedOptimizer, sgd(model), algorithm=AllReduce)
    raises(UsageError, "bucket_bytes", AllReduce, bucket_bytes=0)
    assert "allreduce" in names()


@check()
def arguments_that_cannot_be(seat: Seat) -> None:
    model = make_model("small", 3)
    named = list(model.named_parameters())
    weight = named[0][1]
    cases = [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"named_parameters": model.parameters()}, "named_parameters"),
        ({"named_parameters": [*named, ("twice", weight), ("twice", weight)]}, "twice"),
        ({"named_parameters": named[:1]}, "not named"),
        ({"groups": 0}, "groups"),
        ({"groups": -1}, "groups"),
        ({"groups": [weight]}, "groups"),
        ({"groups": [[1]]}, "groups"),
        ({"groups": [[weight], [weight]]}, "once"),
        ({"op": 17}, "17"),
    ]
    for options, text in cases:
        raises(ValueError, text, hvd.DistributedOptimizer, sgd(model), **options)
    raises(ValueError, "Linear", hvd.DistributedOptimizer, torch.nn.Linear(1, 1))
