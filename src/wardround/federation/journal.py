"""Local state on disk, one file an exchange: a client may be asked twice, die and come back, or go back in time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from wardround.errors import RunError
from wardround.federation.files import write_atomically
from wardround.federation.messages import plain_copy
from wardround.federation.store import file_name, save_state

Place = tuple[int, int]  # round, number of the exchange in it
AFTER_ALL = 10**6  # the number of what comes after all exchanges of a round


@dataclass
class _Visit:
    """An exchange with a client: where in the run, the oldest round to resume from, whether its state is kept yet."""

    place: Place
    resumable: int
    kept: bool = False


class Journal:
    """What clients kept after each exchange, back to the oldest one that the server may resume from.

    The state with which a message is answered is that of the exchange before it, whatever has happened since. So a
    message that comes a second time has the same answer, and a server that resumes from a checkpoint finds its clients
    where they were then.

    Args:
        folder: this experiment's own, on a disk that all processes share which may answer for a client.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._visits: dict[str, _Visit] = {}

    def begin(self, client: str, scalars: Mapping[str, Any]) -> None:
        """The message says where in the run it stands."""
        place = (int(scalars["round"]), int(scalars.get("exchange", AFTER_ALL)))
        self._visits[client] = _Visit(place, int(scalars.get("resumable", 0)))

    def get(self, client: str) -> dict[str, Tensor]:
        """The state after the last exchange before this one, or what `put` has made of it; empty before the first.

        Raises:
            RunError: its file is damaged.
        """
        visit = self._visits[client]
        past = [place for place in self.places(client) if place < visit.place]
        if visit.kept:
            past.append(visit.place)
        return self._read(client, past[-1]) if past else {}

    def put(self, client: str, state: Mapping[str, Tensor]) -> None:
        """The state after this exchange. What nobody can go back to any more is deleted."""
        visit = self._visits[client]
        data = safetensors.torch.save({name: plain_copy(tensor) for name, tensor in state.items()})
        write_atomically(self._file(client, visit.place), data)
        visit.kept = True
        gone_by = [place for place in self.places(client) if place[0] <= visit.resumable]
        for place in gone_by[:-1]:
            self._file(client, place).unlink()

    def save(self, client: str, folder: Path, extra: Mapping[str, Tensor]) -> None:
        """The state, and `extra` beside it, for a checkpoint."""
        save_state({**self.get(client), **extra}, client, folder)

    def places(self, client: str) -> list[Place]:
        """The exchanges after which the state of `client` is kept, oldest first."""
        found = (re.fullmatch(r"(\d+)-(\d+)\.safetensors", path.name) for path in self._home(client).glob("*-*"))
        return sorted((int(name[1]), int(name[2])) for name in found if name)

    def _read(self, client: str, place: Place) -> dict[str, Tensor]:
        file = self._file(client, place)
        try:
            return safetensors.torch.load(file.read_bytes())
        except (safetensors.SafetensorError, ValueError) as error:
            raise RunError(f"{file}: the client's state is damaged ({error})") from error

    def _home(self, client: str) -> Path:
        return self.folder / Path(file_name(client)).stem

    def _file(self, client: str, place: Place) -> Path:
        return self._home(client) / f"{place[0]:05d}-{place[1]:02d}.safetensors"
