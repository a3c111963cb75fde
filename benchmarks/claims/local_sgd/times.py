"""Figures 5, 6, 9 and 10: communication in a step, and speedup by the number of processes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import Evidence
from claims.local_sgd.scaling import FLAT, Scaling, draw, gain, predicted
from claims.local_sgd.timed import NAMES, Communication, communication
from claims.local_sgd.timed import draw as draw_communication
from claims.local_sgd.timed import judge as judge_communication
from claims.papers import LOCAL_SGD
from sordino.plan import Rates
from sordino.report import Results


def _speedups(
    scaling: Scaling, timed: Communication, quick: bool
) -> Generator[Sequence[Run], list[Results], tuple[list[Evidence], Results, list[Results]]]:
    """Ask for the time of computation and for the jobs; return evidence, speedups and the results of the jobs."""
    [line] = yield from scaling.ask(quick)
    jobs = yield from timed.ask()
    evidence, shapes = scaling.found(Rates.from_results(jobs[0]["rates"]), line)
    return evidence, shapes, jobs


# ---- Figure 6: communication in a step with the parameters of ResNet-20 ----


FIGURE_6_TIMED = Communication("resnet20", 8, ((4, 2), (2, 2), (4, 1)), 100.0, turns=8, rounds=6, budget=15.0)
FIGURE_6_QUICK = Communication("resnet20", 8, ((2, 2),), 2000.0, turns=2, rounds=2, budget=1.0)


FIGURE_6_CLAIM = Claim(
    name="local-sgd-figure-6",
    paper=LOCAL_SGD,
    place="Figure 6 and equations 5 to 8",
    says="Local SGD communicates less than synchronous SGD, and averaging shards takes 1/K of the time of averaging "
    "whole models.",
    setting="ResNet-20 on up to 128 KNL nodes with Cray Aries, P = 4, I = 8.",
    here="The 0.27 M parameters of ResNet-20 on up to 8 emulated hosts of one worker, with links of "
    f"{FIGURE_6_TIMED.mbps:g} Mbps and no computation; all ways in turns in one job, {FIGURE_6_TIMED.turns} turns. "
    "Predictions are equations 3 to 8 as in `sordino plan`, with links measured in the same job. It needs root.",
    plan=partial(communication, FIGURE_6_TIMED, FIGURE_6_QUICK),
    why="Both parts hold. With P = 4 and K = 2 local SGD communicates 0.65 times as long in a step as synchronous SGD, "
    "and averaging shards takes 0.50 times as long as averaging whole models, as 1/K predicts. In a whole step shards "
    "save less, 13 %, because gradients are averaged within a group in every step and models only in every eighth. "
    "With K = 1 only models are sent: 0.125 times as long, which is 1/I. The predictions of equations 3 to 8, from "
    "links measured in the same job, are within 8 % of the measurements for all ways and shapes.",
    draw=draw_communication,
)


# ---- Figure 5: speedup of ResNet-20 by the number of processes ----


FIGURE_5_SCALING = Scaling("resnet20", models=4, interval=8, batch=128, flat=32, linear=16)


def plan_figure_5(quick: bool) -> Plan:
    """Predict from computation on a core, and from the links of Figure 6's first job."""
    timed = FIGURE_6_QUICK if quick else FIGURE_6_TIMED
    evidence, shapes, jobs = yield from _speedups(FIGURE_5_SCALING, timed, quick)
    what = f"whole models from 32 to 64 processes, speedup; less than {FLAT:g}"
    evidence.append(predicted(what, gain(shapes["speedups"], "allreduce", 64), FLAT, above=False))
    return Found([*evidence, *judge_communication(timed, jobs)[-3:]], shapes)


FIGURE_5_CLAIM = Claim(
    name="local-sgd-figure-5",
    paper=LOCAL_SGD,
    place="Figure 5",
    says="Synchronous SGD's speedup flattens at 32 processes. Local SGD that averages shards is almost linear up to 16 "
    "and best everywhere; with whole models it flattens at 64.",
    setting="ResNet-20 on up to 128 KNL nodes with Cray Aries, P = 4, I = 8, B = 128; synchronous SGD with "
    "mini-batches of 512.",
    here="Predicted by `sordino.plan.cost_of`, including the part that hides behind backward. A process has one core "
    "of this machine, on which computing is measured. Links are measured in Figure 6's job, which compares predictions "
    "with measurements. The source does not give the ratio of communication to computing. So all communication is "
    f"slowed down until synchronous SGD is flat at {FIGURE_5_SCALING.flat} processes: a doubling brings a factor of "
    f"{FLAT:g}. It needs root.",
    plan=plan_figure_5,
    why="Where synchronous SGD flattens as in the source, local SGD of whole models does too, as the source says. "
    "Shards are fastest at every count from 8 on, but only by 3 and 7 % at 64 processes, which is less than the error "
    "of predictions. They are far from linear: 7.7 times as fast at 16 processes. Bytes alone do not explain the "
    "source's synchronous SGD. Around 32 processes a ring sends 1.94 models per step and within 8 of them 1.75, so "
    "groups save little of the bytes of every step, and the same links bound all ways. Fewer hops would make a "
    "difference, but on emulated links a hop takes no measurable time.",
    draw=draw,
)


# ---- Figure 10: communication in a step with the parameters of EDSR ----


FIGURE_10_TIMED = Communication("edsr", 4, ((2, 2),), 1000.0, turns=4, rounds=1, budget=15.0)
FIGURE_10_QUICK = Communication("resnet20", 4, ((2, 2),), 2000.0, turns=2, rounds=2, budget=1.0)


FIGURE_10_CLAIM = Claim(
    name="local-sgd-figure-10",
    paper=LOCAL_SGD,
    place="Figure 10",
    says="Local SGD communicates less than synchronous SGD, and averaging shards takes 1/K of the time of averaging "
    "whole models.",
    setting="EDSR on up to 64 KNL nodes with Cray Aries, P = 8, I = 4.",
    here=f"The 40.7 M parameters of EDSR on 4 emulated hosts of one worker, with links of {FIGURE_10_TIMED.mbps:g} "
    f"Mbps and no computation; all ways in turns in one job, {FIGURE_10_TIMED.turns} turns. Predictions are equations "
    "3 to 8 as in `sordino plan`, with links measured in the same job. It needs root.",
    plan=partial(communication, FIGURE_10_TIMED, FIGURE_10_QUICK),
    why="Both parts hold. In a step local SGD communicates 0.79 times as long as synchronous SGD, and averaging shards "
    "takes 0.65 times as long as averaging whole models, with half the bytes. In a whole step shards save 6 %, not "
    "half: gradients are averaged within a group in every step, which is most of the traffic, and models only in every "
    "fourth step. The predictions of equations 3 to 8, from links measured in the same job, are within 6 % of the "
    "measurements.",
    draw=draw_communication,
)


# ---- Figure 9: speedup of EDSR by the number of processes ----


FIGURE_9_SCALING = Scaling("edsr", models=8, interval=4, batch=16, flat=64, linear=32)


def plan_figure_9(quick: bool) -> Plan:
    """Predict from computation on a core, and from the links of Figure 10's job."""
    timed = FIGURE_10_QUICK if quick else FIGURE_10_TIMED
    evidence, shapes, _ = yield from _speedups(FIGURE_9_SCALING, timed, quick)
    for way in ("sharded", "allreduce"):
        what = f"{NAMES[way]} from 32 to 64 processes, speedup; more than {FLAT:g}"
        evidence.append(predicted(what, gain(shapes["speedups"], way, 64), FLAT))
    return Found(evidence, shapes)


FIGURE_9_CLAIM = Claim(
    name="local-sgd-figure-9",
    paper=LOCAL_SGD,
    place="Figure 9",
    says="Synchronous SGD's speedup flattens at 64 processes. Local SGD scales up to 64, better with shards than with "
    "whole models.",
    setting="EDSR on up to 64 KNL nodes with Cray Aries, P = 8, I = 4, B = 16; synchronous SGD with mini-batches of "
    "128.",
    here="Predicted as in Figure 5, for processes of one core of this machine (a residual block on patches of 48 x 48 "
    "is measured), with links measured in Figure 10's job. All communication is slowed down until synchronous SGD is "
    f"flat at {FIGURE_9_SCALING.flat} processes. It needs root.",
    plan=plan_figure_9,
    why="Both ways of local SGD still gain from 32 to 64 processes, and there shards are 9 % above whole models, as "
    "the source says. But neither is above synchronous SGD there; shards are level with it. Shards average models with "
    "half the bytes or less. Yet half of the bytes that they send in a step, the all-gather of parameters, come after "
    "the optimizer's step where backward cannot hide them; the two other ways hide an all-reduce behind backward. So "
    "at 16 and 32 processes shards are the slowest of the three. `LocalSGD(overlap=True)` hides the all-gather behind "
    "loading, which is not part of this training.",
    draw=draw,
)
