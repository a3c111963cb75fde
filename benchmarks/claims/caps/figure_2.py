"""Figure 2: the share of unchanged parameters in AlexNet's layers, as training converges."""

from __future__ import annotations

from claims.caps.layers import EPOCHS, SEEDS, at, compared, draw, shapes, shares_of
from claims.claim import Claim, Found, Plan
from claims.evidence import above
from claims.papers import CAPS

_KINDS = [{"optimizer": name} for name in ("momentum", "plain", "adam")]
_WORDS = {"momentum": "SGD with momentum", "plain": "SGD without momentum", "adam": "Adam"}


def plan(quick: bool) -> Plan:
    """Every optimizer and way to compare; convolutions and linear layers, first and last epoch."""
    shares = yield from shares_of(_KINDS, quick)
    rises, gaps = [], []
    for (optimizer, digits), seeds in shares.items():
        layers = list(seeds[0])  # two convolutions, two linear layers
        convolutions, linear = layers[:2], layers[2:]
        where = f"{_WORDS[optimizer]}, {compared(digits)}"
        rise = [at(one, layers, -1) - at(one, layers, 0) for one in seeds]
        gap = [at(one, linear, -1) - at(one, convolutions, -1) for one in seeds]
        rises.append(above(f"{where}: last epoch - first, mean of the layers, points", rise))
        gaps.append(above(f"{where}: linear layers - convolutions, last epoch, points", gap))
    return Found([*rises, *gaps], shapes(shares))


CLAIM = Claim(
    name="caps-figure-2",
    paper=CAPS,
    place="Figure 2",
    says="As the loss converges, more and more parameters stay unchanged in a step; more so in fully connected layers "
    "than in convolutions.",
    setting="AlexNet on CIFAR-10, some 20 epochs; neither the optimizer nor how parameters are compared is said.",
    here=f"The network with dropout, {EPOCHS} epochs at one learning rate, nothing skipped; {SEEDS} seeds.",
    plan=plan,
    why="What the figure shows depends on two things that the source does not say. With SGD the shares do not rise: "
    "steps are in proportion to gradients, which stay large at a constant rate, and in the first epoch, when "
    "nothing has been learnt yet, more stays unchanged than later. With Adam they rise, if parameters are "
    "compared to four or three digits: to 23 % of the last layer and 15 % of the first, or to 84 and 81 %; bit "
    "for bit, hardly anything stays unchanged with any optimizer but where ReLU or dropout lets no gradient "
    "through. So the figure is one of rounding: three digits make 2 % into 80. That linear layers keep more than "
    "convolutions holds in all nine cases.",
    draw=draw,
)
