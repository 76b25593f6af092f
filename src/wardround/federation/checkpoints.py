"""Checkpoints: a folder a round, complete once its manifest is there, verified by checksum before use.

A round's folder grows as `round-0004.partial`, where clients write their own state. It is then renamed
`round-0004.sealed`, so that a client that comes too late cannot write there; the server adds its state, the manifest
with all checksums comes last, and another rename makes it `round-0004`. Whatever a crash leaves behind is never
mistaken for a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from wardround.errors import InputError, RunError
from wardround.federation.files import checksum, sync_folder, uninterrupted, write_atomically
from wardround.federation.messages import named, plain_copy
from wardround.federation.server import Server
from wardround.federation.store import file_name

MANIFEST = "manifest.json"
SERVER = "server.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete and verified checkpoint.

    Attributes:
        folder: where it is.
        round: at whose end it was made.
        notes: what `commit` was given for whoever resumes.
        files: checksums by file name.
    """

    folder: Path
    round: int
    notes: Mapping[str, Any]
    files: Mapping[str, str]

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
        file = file_name(name)
        return safetensors.torch.load_file(self.folder / file) if file in self.files else {}


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds a subfolder a round.
        experiment: a hash of everything that decides the run's numbers; None reads checkpoints of any experiment.
        keep: how many of the latest rounds to keep, the best one besides.
    """

    def __init__(self, folder: Path, experiment: str | None, keep: int = 2) -> None:
        self.folder = folder
        self.experiment = experiment
        self.keep = keep
        self.complaints: list[str] = []

    def complete(self, round: int) -> Path:
        """Where the checkpoint of `round` is once it is whole."""
        return self.folder / f"round-{round:04d}"

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
        try:
            with uninterrupted():
                sealed = self._seal(server.round)
                self._carry_over(sealed, server.round, clients)
                self._write(sealed, server, {"best": best, **notes})
                _replace_folder(sealed, self.complete(server.round))
                self._prune(server.round, best)
        except OSError as error:
            self._discard_unfinished(server.round)
            kept = self.rounds()
            last = f"the last complete one is of round {kept[-1]}" if kept else "there is no earlier one"
            raise RunError(
                f"{self.folder}: the checkpoint of round {server.round} could not be written "
                f"({error.strerror or error}); {last}. Free some space and start again with --resume."
            ) from error

    def rounds(self) -> list[int]:
        """The rounds that have a complete folder, oldest first."""
        return sorted(round for path, round, finished in self._folders() if finished and (path / MANIFEST).exists())

    def oldest_kept(self) -> int:
        """The round that a run goes back to if all later checkpoints prove damaged; 0 for its start."""
        rounds = self.rounds()
        return rounds[-self.keep] if len(rounds) >= self.keep else 0

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is passed over, and `complaints` says so.

        Raises:
            RunError: there are checkpoints and all of them are damaged.
            InputError: it belongs to another experiment.
        """
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                return self.load(round)
            except RunError as error:
                self.complaints.append(f"{error}; going back to the one before it")
        if rounds:
            raise RunError(f"{self.folder}: no checkpoint is whole. " + "; ".join(self.complaints))
        return None

    def load(self, round: int) -> Checkpoint:
        """The checkpoint of `round`, verified.

        Raises:
            RunError: a file is missing or its checksum differs.
            InputError: it belongs to another experiment.
        """
        folder = self.complete(round)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            files, experiment, notes = manifest["files"], manifest["experiment"], dict(manifest["notes"])
            damaged = [name for name, digest in files.items() if checksum(folder / name) != digest]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise RunError(f"{folder}: the checkpoint is damaged ({type(error).__name__}: {error})") from error
        if damaged:
            raise RunError(f"{folder}: the checkpoint is damaged (checksum of {', '.join(damaged)})")
        if self.experiment not in (None, experiment):
            raise InputError(f"{folder}: the checkpoint belongs to another experiment, or to another version of it")
        return Checkpoint(folder, round, notes, files)

    def forget_after(self, round: int) -> None:
        """Delete every complete checkpoint of a round later than `round`, and whatever is unfinished."""
        for path, number, finished in self._folders():
            if number > round or not finished:
                shutil.rmtree(path)

    def _folders(self) -> list[tuple[Path, int, bool]]:
        """Every folder of a round with its number and whether its name says that it is complete."""
        found = []
        for path in self.folder.glob("round-*"):
            name = re.fullmatch(r"round-(\d+)(\.partial|\.sealed)?", path.name)
            if name:
                found.append((path, int(name[1]), name[2] is None))
        return found

    def _seal(self, round: int) -> Path:
        """Close the folder in which clients wrote, which may be none."""
        partial = self.partial(round)
        partial.mkdir(parents=True, exist_ok=True)
        sealed = partial.with_suffix(".sealed")
        _replace_folder(partial, sealed)
        return sealed

    def _carry_over(self, folder: Path, round: int, clients: Iterable[str]) -> None:
        """Copy what clients wrote for the checkpoint before this one and did not write anew."""
        earlier = [r for r in self.rounds() if r < round]
        silent = [name for name in map(file_name, clients) if not (folder / name).exists()]
        if not (earlier and silent):
            return
        previous = self.load(earlier[-1])  # verified, or damage would be copied and pass for whole
        for name in silent:
            if name in previous.files:
                write_atomically(folder / name, (previous.folder / name).read_bytes())

    def _write(self, folder: Path, server: Server, notes: Mapping[str, Any]) -> None:
        """Add the server's state, and last the manifest."""
        tensors = named("state", server.state) | named("memory", server.memory)
        copies = {name: plain_copy(tensor) for name, tensor in tensors.items()}
        write_atomically(folder / SERVER, safetensors.torch.save(copies))
        files = {path.name: checksum(path) for path in sorted(folder.glob("*.safetensors"))}
        manifest = {"round": server.round, "experiment": self.experiment, "files": files, "notes": notes}
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())

    def _prune(self, round: int, best: int | None) -> None:
        for old in self.rounds()[: -self.keep]:
            if old != best:
                shutil.rmtree(self.complete(old))
        self._discard_unfinished(round)

    def _discard_unfinished(self, round: int) -> None:
        for path, number, finished in self._folders():
            if number <= round and not finished:
                shutil.rmtree(path, ignore_errors=True)


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)
    sync_folder(target.parent)
