"""The same vector of many clients, for servers that must see all of them at once: in memory while they are few."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from torch import Tensor

from wardround.federation.messages import plain_copy

BLOCK = 2**15  # columns that are looked at together
BUDGET = 2**28  # bytes of all stacks of a round that stay in memory


class Stack:
    """N vectors of one length, float32, which come one after the other and are read in blocks of columns.

    Args:
        length: of each vector.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0
        self._rows: list[Tensor] = []
        self._file: IO[bytes] | None = None

    @classmethod
    def of(cls, values: Tensor) -> Stack:
        """The rows of a tensor `(N, ...)`."""
        rows = values.flatten(1)
        stack = cls(rows.shape[1])
        for row in rows:
            stack.append(row)
        return stack

    def append(self, row: Tensor) -> None:
        """One more vector `(length,)`."""
        self.count += 1
        if self._file is None:
            self._rows.append(row)
        else:
            self._file.seek(0, os.SEEK_END)  # it may have been read since the last one
            self._file.write(row.numpy().tobytes())

    def spill(self) -> None:
        """Move what there is to a file, which goes when this object does, and write there from now on."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the stack
            for row in self._rows:
                self._file.write(row.numpy().tobytes())
            self._rows = []

    def blocks(self) -> Iterator[Tensor]:
        """All vectors, some columns at a time: `(N, up to BLOCK)`."""
        for start in range(0, self.length, BLOCK):
            stop = min(self.length, start + BLOCK)
            yield torch.stack([self._part(number, start, stop) for number in range(self.count)])

    def gram(self) -> Tensor:
        """The vectors' inner products `(N, N)`, float64."""
        products = torch.zeros(self.count, self.count, dtype=torch.float64)
        for block in self.blocks():
            products += (block @ block.T).double()
        return products

    def mixed(self, weights: Tensor) -> Tensor:
        """Weighted sums: for weights `(M, N)` the M vectors `(M, length)`."""
        narrow = weights.float()
        parts = [narrow @ block for block in self.blocks()]
        return torch.cat(parts, dim=1) if parts else torch.zeros(len(weights), 0)

    def _part(self, number: int, start: int, stop: int) -> Tensor:
        if self._file is None:
            return self._rows[number][start:stop]
        self._file.seek(4 * (number * self.length + start))
        return torch.from_numpy(np.frombuffer(self._file.read(4 * (stop - start)), dtype=np.float32).copy())


class Stacks:
    """A stack by name. Together they stay within a budget of memory; beyond it they are on disk.

    Args:
        budget: in bytes.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._stacks: dict[str, Stack] = {}
        self._bytes = 0

    def append(self, name: str, values: Tensor) -> None:
        """One more client's tensor of that name, copied: a view would keep the whole message."""
        row = plain_copy(values).float().flatten()
        self._stacks.setdefault(name, Stack(len(row))).append(row)
        self._bytes += row.nbytes
        if self._bytes > self.budget:
            for stack in self._stacks.values():
                stack.spill()

    def __getitem__(self, name: str) -> Stack:
        return self._stacks[name]
