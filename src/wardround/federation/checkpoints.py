"""Checkpoints: a folder a round, complete once its manifest is there, verified by checksum before use.

A round's folder grows as `round-0004.partial`: clients write their own state, the server adds its own, the manifest
with all checksums comes last, and a rename makes it `round-0004`. Whatever a crash leaves behind is never mistaken
for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from wardround.errors import RunError
from wardround.federation.files import checksum, uninterrupted, write_atomically
from wardround.federation.messages import named
from wardround.federation.server import Server
from wardround.federation.store import file_name

MANIFEST = "manifest.json"
SERVER = "server.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete and verified checkpoint."""

    folder: Path
    round: int
    notes: Mapping[str, Any]

    def server(self) -> Server:
        """The server as it was at the end of the round."""
        tensors = safetensors.torch.load_file(self.folder / SERVER)
        spaces: dict[str, dict[str, Tensor]] = {"state": {}, "memory": {}}
        for name, tensor in tensors.items():
            space, rest = name.split("/", 1)
            spaces[space][rest] = tensor
        return Server(spaces["state"], spaces["memory"], self.round)

    def client(self, name: str) -> dict[str, Tensor]:
        """The local state of client `name`; empty where it has none."""
        file = self.folder / file_name(name)
        return safetensors.torch.load_file(file) if file.exists() else {}


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds a subfolder a round.
        experiment: a hash of everything that decides the run's numbers.
        keep: how many of the latest rounds to keep, the best one besides.
    """

    def __init__(self, folder: Path, experiment: str, keep: int = 2) -> None:
        self.folder = folder
        self.experiment = experiment
        self.keep = keep
        self.complaints: list[str] = []

    def partial(self, round: int) -> Path:
        """Where the checkpoint of `round` is being gathered."""
        return self.folder / f"round-{round:04d}.partial"

    def commit(self, server: Server, clients: Iterable[str], best: int | None = None, **notes: Any) -> None:
        """Complete the checkpoint of `server.round`; Ctrl-C waits until it is whole.

        Args:
            server: its state and memory are written.
            clients: all clients; one that wrote nothing this round keeps its file of the previous checkpoint.
            best: a round to keep beside the latest.
            notes: JSON values for whoever resumes.

        Raises:
            RunError: the disk is full or fails. Earlier checkpoints stand.
        """
        partial = self.partial(server.round)
        try:
            with uninterrupted():
                partial.mkdir(parents=True, exist_ok=True)
                self._carry_over(partial, server.round, clients)
                tensors = named("state", server.state) | named("memory", server.memory)
                write_atomically(partial / SERVER, safetensors.torch.save(tensors))
                manifest = self._manifest(partial, server.round, {"best": best, **notes})
                write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
                _replace_folder(partial, partial.with_suffix(""))
                self._prune(server.round, best)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = self.rounds()
            last = f"the last complete one is of round {kept[-1]}" if kept else "there is no earlier one"
            raise RunError(
                f"{self.folder}: the checkpoint of round {server.round} could not be written "
                f"({error.strerror or error}); {last}. Free some space and start again with --resume."
            ) from error

    def rounds(self) -> list[int]:
        """The rounds that have a complete folder, oldest first."""
        found = self.folder.glob("round-????") if self.folder.exists() else ()
        return sorted(int(path.name.removeprefix("round-")) for path in found if (path / MANIFEST).exists())

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is passed over, and `complaints` says so."""
        for round in reversed(self.rounds()):
            try:
                return self.load(round)
            except RunError as error:
                self.complaints.append(f"{error}; going back to the one before it")
        return None

    def load(self, round: int) -> Checkpoint:
        """The checkpoint of `round`, verified.

        Raises:
            RunError: a file is missing or its checksum differs.
        """
        folder = self.folder / f"round-{round:04d}"
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            files = manifest["files"].items()
            damaged = [name for name, digest in files if checksum(folder / name) != digest]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise RunError(f"{folder}: the checkpoint is damaged ({error})") from error
        if damaged:
            raise RunError(f"{folder}: the checkpoint is damaged (checksum of {', '.join(damaged)})")
        return Checkpoint(folder, round, manifest["notes"] | {"experiment": manifest["experiment"]})

    def forget_after(self, round: int) -> None:
        """Delete every complete or partial checkpoint of a round later than `round`."""
        for path in self.folder.glob("round-*") if self.folder.exists() else ():
            number = path.name.removeprefix("round-").removesuffix(".partial")
            if path.name.endswith(".partial") or int(number) > round:
                shutil.rmtree(path)

    def _carry_over(self, partial: Path, round: int, clients: Iterable[str]) -> None:
        earlier = [r for r in self.rounds() if r < round]
        if not earlier:
            return
        previous = self.folder / f"round-{earlier[-1]:04d}"
        for client in clients:
            old, new = previous / file_name(client), partial / file_name(client)
            if old.exists() and not new.exists():
                shutil.copyfile(old, new)

    def _manifest(self, folder: Path, round: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        files = {path.name: checksum(path) for path in sorted(folder.glob("*.safetensors"))}
        return {"round": round, "experiment": self.experiment, "files": files, "notes": notes}

    def _prune(self, round: int, best: int | None) -> None:
        for old in self.rounds()[: -self.keep]:
            if old != best:
                shutil.rmtree(self.folder / f"round-{old:04d}")


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)  # make the rename itself durable
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
