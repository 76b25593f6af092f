"""Where a client's own state lives between rounds: in memory up to a stated budget, on disk beyond it."""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import safetensors.torch
from torch import Tensor

from wardround.federation.files import write_atomically
from wardround.federation.messages import plain_copy

LONGEST_NAME = 150  # file systems allow 255 bytes for a file's name


def file_name(client: str) -> str:
    """A file name for `client`, unique and safe whatever characters its name holds.

    >>> file_name("St. Mary's / A")
    'client-St.%20Mary%27s%20%2F%20A.safetensors'
    """
    name = quote(client, safe="")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}~{hashlib.sha256(client.encode()).hexdigest()[:16]}"
    return f"client-{name}.safetensors"


class Store(Protocol):
    """Where a client half keeps what its clients keep."""

    def begin(self, client: str, scalars: Mapping[str, Any]) -> None:
        """`client` is about to answer a message with these scalars."""

    def get(self, client: str) -> dict[str, Tensor]:
        """The state with which it answers, as a copy; empty before its first."""

    def put(self, client: str, state: Mapping[str, Tensor]) -> None:
        """What the answer leaves behind."""

    def save(self, client: str, folder: Path, extra: Mapping[str, Tensor]) -> None:
        """Write the state, and `extra` beside it, to `folder` for a checkpoint."""


class ClientStore:
    """Local state of many clients, least recently used first to leave the memory.

    Args:
        folder: where states beyond the budget are kept, in a folder of this store's own that is made when first
            needed: what an earlier run or another worker left there is never taken for this store's.
        budget: bytes of state that may stay in memory.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._parent = folder
        self.budget = budget
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._spilled: set[str] = set()

    @cached_property
    def folder(self) -> Path:
        """This store's own folder."""
        self._parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._parent))

    def begin(self, client: str, scalars: Mapping[str, Any]) -> None:
        """`client` is about to answer a message with these scalars. This store keeps the latest state alone."""

    def get(self, client: str) -> dict[str, Tensor]:
        """A copy of the state of `client`; empty before its first `put`."""
        if client in self._memory:
            self._memory.move_to_end(client)
            return {name: plain_copy(tensor) for name, tensor in self._memory[client].items()}
        return safetensors.torch.load_file(self.folder / file_name(client)) if client in self._spilled else {}

    def put(self, client: str, state: Mapping[str, Tensor]) -> None:
        """Replace the state of `client` by a copy of `state`."""
        self._forget(client)
        self._memory[client] = {name: plain_copy(tensor) for name, tensor in state.items()}
        self._bytes += _size(state)
        while self._bytes > self.budget and self._memory:
            self._spill(next(iter(self._memory)))

    def save(self, client: str, folder: Path, extra: Mapping[str, Tensor]) -> None:
        """Write the state of `client`, and `extra` beside it, to `folder` for a checkpoint."""
        save_state({**self.get(client), **extra}, client, folder)

    def _forget(self, client: str) -> None:
        if client in self._memory:
            self._bytes -= _size(self._memory.pop(client))

    def _spill(self, client: str) -> None:
        frame = safetensors.torch.save(self._memory[client])
        write_atomically(self.folder / file_name(client), frame, durable=False)
        self._spilled.add(client)
        self._forget(client)


def save_state(state: Mapping[str, Tensor], client: str, folder: Path) -> None:
    """Write the state of `client` to its file in `folder`; an empty one has no file."""
    if state:
        write_atomically(folder / file_name(client), safetensors.torch.save(dict(state)))


def _size(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
