"""Layers that keep, while asked to, the tensor whose distribution a method compares between clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Records(nn.Module):
    """A layer that hands a tensor of its forward pass to `keep`.

    Attributes:
        recording: whether it is kept.
        recorded: that of the last forward pass, with its graph; None where nothing was kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.recorded: Tensor | None = None

    def keep(self, h: Tensor) -> None:
        """Record h, or nothing."""
        self.recorded = h if self.recording else None

    def __getstate__(self) -> dict[str, Any]:
        """Without the recorded tensor: a graph can be neither copied nor pickled."""
        return {**self.__dict__, "recorded": None}


@contextmanager
def recording(layers: Sequence[Records]) -> Iterator[None]:
    """Let `layers` keep the tensor whose distribution is compared, and drop it afterwards."""
    for layer in layers:
        layer.recording = True
    try:
        yield
    finally:
        for layer in layers:
            layer.recording, layer.recorded = False, None
