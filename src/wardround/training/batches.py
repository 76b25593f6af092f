"""The order in which a client sees its images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def shuffled_batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Index batches `(B,)` that visit each of `count` images once, in an order drawn from `generator`.

    Nothing is dropped. A last batch of one image, on which batch normalisation cannot compute a variance, joins the
    batch before it, unless all batches are of one; a client with one image gets that one.
    """
    order = torch.randperm(count, generator=generator)
    starts = batch_starts(count, size)
    for start, end in zip(starts, [*starts[1:], count], strict=False):  # no image, no batch
        yield order[start:end]


def batch_starts(count: int, size: int) -> list[int]:
    """Where each batch of an epoch over `count` images begins; see `shuffled_batches`."""
    starts = list(range(0, count, size))
    if size > 1 and len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return starts
