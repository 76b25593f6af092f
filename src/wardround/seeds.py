"""Every random draw comes from a stream keyed by (seed, purpose, round, client).

Two draws with different keys are independent, and no draw depends on how many others were made before it, by
which worker, or in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def key(seed: int, purpose: str, round: int = 0, client: str = "") -> int:
    """A 63-bit integer that depends on all four parts of the key.

    >>> key(0, "batches", 1, "a") == key(0, "batches", 1, "a") != key(0, "batches", 1, "b")
    True
    """
    text = f"{seed}|{purpose}|{round}|{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_stream(seed: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A NumPy generator for one key."""
    return np.random.default_rng(key(seed, purpose, round, client))


def torch_stream(seed: int, purpose: str, round: int = 0, client: str = "") -> torch.Generator:
    """A CPU torch generator for one key."""
    import torch

    return torch.Generator().manual_seed(key(seed, purpose, round, client))


@contextmanager
def torch_scope(seed: int, purpose: str, round: int = 0, client: str = "") -> Iterator[None]:
    """Run a block with torch's *global* generators on one key (dropout, weight initialisation), then restore them.

    Without a GPU only the processor's generator is touched: torch would look for devices every time, and keep a note
    with a stack trace for each seed that a GPU might want later.
    """
    import torch

    number = key(seed, purpose, round, client)
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        with torch.random.fork_rng():
            torch.manual_seed(number)
            yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            yield
