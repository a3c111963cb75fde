"""Count of blocks or values that are not finite, made on a device and read by the host later."""

from __future__ import annotations

import torch

from sordino.runtime.devices import HOST


class BlockCount:
    """A number on a device, with a copy for the host.

    On a GPU the copy is made in the order of the current stream. The host waits for the copy only when it reads it, and
    never for work that was queued after `send`.

    Args:
        device: device of the number.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 tensor [1], to which encodings add their counts."""
        self._on_gpu = device.type == "cuda"
        self._copy = torch.zeros(1, dtype=torch.int32, device=HOST, pin_memory=True) if self._on_gpu else self.value
        self._sent = torch.cuda.Event() if self._on_gpu else None

    def send(self) -> None:
        """Copy the number to the host, in the order of the current stream."""
        if self._sent is not None:
            self._copy.copy_(self.value, non_blocking=True)
            self._sent.record(torch.cuda.current_stream(self.value.device))

    def read(self) -> int:
        """Wait for the copy of the last `send`, and return the number."""
        if self._sent is not None:
            self._sent.synchronize()
        return int(self._copy)
