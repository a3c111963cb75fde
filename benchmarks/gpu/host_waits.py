"""Number of the host's waits for the GPU in a step: blocking CUDA calls, counted by PyTorch's profiler.

A loop that polls the GPU makes none of these calls, so it is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.place import Place
from sordino.timing import Run

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
STEP = "one step"
STEPS = 3


def within(events: Iterable[Any], steps: int) -> dict[str, float]:
    """Return the number of blocking calls per step, of each kind and in total.

    Args:
        events: events of the profiler. Its own calls, outside of the host's spans named STEP, are not counted.
        steps: number of these spans. RuntimeError if there are more or less.
    """
    events = list(events)
    spans = [one.time_range for one in events if one.name == STEP and one.device_type == DeviceType.CPU]
    if len(spans) != steps:
        raise RuntimeError(f"the profiler has seen {len(spans)} of {steps} steps")
    found = Counter(
        one.name
        for one in events
        if one.name in WAITS and any(span.start <= one.time_range.start <= span.end for span in spans)
    )
    return {name: found[name] / steps for name in WAITS} | {"total": sum(found.values()) / steps}


def count(step: Run, place: Place, steps: int = STEPS) -> dict[str, float]:
    """Run `steps` steps after as many for warm-up; return the host's waits per step, on all its threads."""
    for _ in range(steps):
        step()
    place.finish()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
        place.finish()
    return within(profiler.events() or (), steps)
