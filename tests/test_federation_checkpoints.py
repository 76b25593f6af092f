"""Checkpoints: whole or not there, and never trusted unread."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from wardround.errors import InputError, RunError
from wardround.federation import checkpoints as module
from wardround.federation.checkpoints import MANIFEST, SERVER, Checkpoints
from wardround.federation.files import write_atomically
from wardround.federation.server import Server
from wardround.federation.store import file_name

NAMES = ("a", "St. Mary's / B", "c")


def server(round: int) -> Server:
    """A server whose numbers tell its round."""
    return Server({"w": torch.full((3,), float(round)), "n": torch.tensor(round)}, {"target/t": torch.ones(2)}, round)


def write_client(checkpoints: Checkpoints, round: int, name: str, value: float) -> None:
    """What a worker does in a round."""
    state = safetensors.torch.save({"state/head": torch.full((2,), value)})
    write_atomically(checkpoints.partial(round) / file_name(name), state)


def fill(
    checkpoints: Checkpoints, round: int, clients: Iterable[str] = NAMES, best: int | None = None, **notes: Any
) -> None:
    """One round whose clients write their state."""
    for name in clients:
        write_client(checkpoints, round, name, float(round))
    checkpoints.commit(server(round), NAMES, best, **notes)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Rounds 1 to 3, of which 2 and 3 are still there."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", "experiment")
    for round in (1, 2, 3):
        fill(checkpoints, round, best_score=0.5)
    return checkpoints


def head(checkpoints: Checkpoints, round: int, name: str) -> float:
    """The number that a client wrote."""
    return checkpoints.load(round).client(name)["state/head"][0].item()


def test_what_is_saved_comes_back(saved: Checkpoints) -> None:
    latest = saved.latest()
    assert latest is not None
    assert latest.round == 3
    back = latest.server()
    assert back.round == 3
    assert back.state["w"].tolist() == [3, 3, 3]
    assert back.state["n"].dtype == torch.int64
    assert back.memory["target/t"].tolist() == [1, 1]
    assert latest.notes == {"best": None, "best_score": 0.5}
    assert [head(saved, 3, name) for name in NAMES] == [3, 3, 3]
    assert latest.client("nobody") == {}
    assert saved.complaints == []


def test_nothing_saved_is_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", "experiment")
    assert checkpoints.rounds() == []
    assert checkpoints.latest() is None
    checkpoints.forget_after(0)
    assert not (tmp_path / "none").exists()


def test_a_server_and_clients_without_state_are_saved_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")
    checkpoints.commit(Server({}, {}, 1), NAMES)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.server() == Server({}, {}, 1)
    assert latest.client("a") == {}


def test_memory_that_shares_tensors_is_saved(tmp_path: Path) -> None:
    checkpoints, whole = Checkpoints(tmp_path, "experiment"), torch.arange(4.0)
    checkpoints.commit(Server({"w": whole}, {"w": whole, "part": whole[2:]}, 1), NAMES)
    assert checkpoints.load(1).server().memory["part"].tolist() == [2, 3]


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")
    kept = []
    for round, best in enumerate([None, 2, 2, 2, 2, 6, 6], 1):
        fill(checkpoints, round, best=best)
        kept.append(checkpoints.rounds())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]


def test_rounds_are_numbers_not_names(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")
    for round in (9998, 9999, 10000, 10001):
        fill(checkpoints, round)
    assert checkpoints.rounds() == [10000, 10001]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.round == 10001


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    for folder, order in ((tmp_path / "one", NAMES), (tmp_path / "two", NAMES[::-1])):
        checkpoints = Checkpoints(folder, "experiment")
        for round in (1, 2):
            fill(checkpoints, round, order, best=1, best_score=0.25)
    one, two = (
        {p.relative_to(root): p.read_bytes() for p in root.rglob("*.*")}
        for root in (tmp_path / "one", tmp_path / "two")
    )
    assert len(one) == 10
    assert one == two


def test_clients_that_did_not_take_part_keep_their_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")
    fill(checkpoints, 1, NAMES[:2])
    assert checkpoints.load(1).client("c") == {}
    fill(checkpoints, 2, NAMES[1:])
    fill(checkpoints, 3, ())
    assert [head(checkpoints, 3, name) for name in NAMES] == [1, 2, 2]


@pytest.mark.parametrize("name", [SERVER, MANIFEST, file_name("a")])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "gone"])
def test_a_damaged_checkpoint_falls_back_and_says_so(saved: Checkpoints, name: str, damage: str) -> None:
    file = saved.complete(3) / name
    content = file.read_bytes()
    changed = {
        "flipped": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:],
        "truncated": content[:-1],
        "empty": b"",
    }
    file.unlink()
    if damage != "gone":
        file.write_bytes(changed[damage])
    latest = saved.latest()
    assert latest is not None
    assert latest.round == 2
    assert [head(saved, 2, client) for client in NAMES] == [2, 2, 2]
    if name != MANIFEST or damage != "gone":  # without a manifest it is an unfinished one
        (complaint,) = saved.complaints
        assert str(saved.complete(3)) in complaint
        assert "damaged" in complaint
        assert "going back to the one before it" in complaint


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", "{}", '{"files": 1}', '{"files": {}, "experiment": "x", "notes": 1}']
)
def test_a_manifest_of_another_form_is_damage(saved: Checkpoints, text: str) -> None:
    (saved.complete(3) / MANIFEST).write_text(text)
    with pytest.raises(RunError, match="is damaged"):
        saved.load(3)


def test_if_none_is_whole_nothing_is_thrown_away(saved: Checkpoints) -> None:
    for round in (2, 3):
        (saved.complete(round) / SERVER).write_bytes(b"")
    with pytest.raises(RunError, match=r"no checkpoint is whole.*round-0003.*round-0002"):
        saved.latest()
    assert saved.rounds() == [2, 3]


def test_a_checkpoint_of_another_experiment_is_refused(saved: Checkpoints) -> None:
    with pytest.raises(InputError, match=r"round-0003: the checkpoint belongs to another experiment"):
        Checkpoints(saved.folder, "another").latest()
    assert Checkpoints(saved.folder, None).latest() is not None


def test_damage_is_not_carried_over_as_if_it_were_whole(saved: Checkpoints) -> None:
    (saved.complete(3) / file_name("a")).write_bytes(b"rot")
    with pytest.raises(RunError, match=r"round-0003: the checkpoint is damaged \(checksum of client-a"):
        fill(saved, 4, NAMES[1:])
    assert saved.rounds() == [2, 3]


def test_unfinished_folders_are_ignored_and_removed(saved: Checkpoints) -> None:
    write_client(saved, 4, "a", 9.0)
    shutil.copytree(saved.complete(3), saved.partial(5))
    shutil.copytree(saved.complete(3), saved.folder / "round-0005.sealed")
    (saved.folder / "round-0006").mkdir()
    (saved.folder / "round-best").mkdir()
    assert saved.rounds() == [2, 3]
    saved.forget_after(3)
    assert sorted(path.name for path in saved.folder.iterdir()) == ["round-0002", "round-0003", "round-best"]


def test_later_rounds_are_forgotten(saved: Checkpoints) -> None:
    saved.forget_after(2)
    assert saved.rounds() == [2]


def test_a_client_that_comes_too_late_changes_no_checkpoint(saved: Checkpoints) -> None:
    write_client(saved, 3, "a", 99.0)
    latest = saved.latest()
    assert latest is not None
    assert latest.round == 3
    assert head(saved, 3, "a") == 3
    fill(saved, 4)
    assert sorted(path.name for path in saved.folder.iterdir()) == ["round-0003", "round-0004"]


def test_a_client_cannot_write_while_the_checkpoint_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")
    calls = []

    def intrude(path: Path, data: bytes) -> None:
        if path.name == MANIFEST:  # all checksums are made
            write_client(checkpoints, 1, "a", 99.0)
            calls.append(path)
        write_atomically(path, data)

    monkeypatch.setattr(module, "write_atomically", intrude)
    fill(checkpoints, 1)
    assert len(calls) == 1
    assert head(checkpoints, 1, "a") == 1


@pytest.mark.parametrize("stage", [SERVER, MANIFEST, file_name("c")])
def test_a_full_disk_loses_no_earlier_checkpoint(
    saved: Checkpoints, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == stage:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, data)

    for name in NAMES[:2]:
        write_client(saved, 4, name, 4.0)
    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(RunError, match=r"round 4 could not be written \(No space left.*is of round 3.*--resume"):
        saved.commit(server(4), NAMES)
    monkeypatch.undo()
    assert sorted(path.name for path in saved.folder.iterdir()) == ["round-0002", "round-0003"]
    latest = saved.latest()
    assert latest is not None
    assert latest.round == 3
    assert [head(saved, 3, name) for name in NAMES] == [3, 3, 3]


def test_a_full_disk_in_the_first_round_says_that_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(RunError, match="there is no earlier one"):
        Checkpoints(tmp_path, "experiment").commit(server(1), NAMES)


TOO_LARGE = """
    import resource, sys, torch
    from pathlib import Path
    from wardround.errors import RunError
    from wardround.federation.checkpoints import Checkpoints
    from wardround.federation.server import Server

    checkpoints = Checkpoints(Path(sys.argv[1]), "experiment")
    checkpoints.commit(Server({"w": torch.ones(10)}, {}, 1), ["a"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        checkpoints.commit(Server({"w": torch.ones(100_000)}, {}, 2), ["a"])
    except RunError as error:
        print(error)
    print([path.name for path in checkpoints.folder.iterdir()], checkpoints.latest().server().state["w"].sum())
"""


def test_a_real_write_that_the_system_refuses(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOO_LARGE), str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, rest = done.stdout.splitlines()
    assert "checkpoint of round 2 could not be written (File too large); the last complete one is of round 1" in message
    assert rest == "['round-0001'] tensor(10.)"


def test_an_interrupt_waits_until_the_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, "experiment")

    def interrupted(path: Path, data: bytes) -> None:
        signal.raise_signal(signal.SIGINT)
        write_atomically(path, data)

    monkeypatch.setattr(module, "write_atomically", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(checkpoints, 1)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.server().state["w"].tolist() == [1, 1, 1]


def test_a_round_that_is_saved_again_replaces_the_old_one(saved: Checkpoints) -> None:
    write_client(saved, 3, "a", 33.0)
    saved.commit(server(3), NAMES)
    assert [head(saved, 3, name) for name in NAMES] == [33, 2, 2]


def test_the_manifest_says_what_it_is_of(saved: Checkpoints) -> None:
    manifest = json.loads((saved.complete(3) / MANIFEST).read_text())
    assert (manifest["round"], manifest["experiment"]) == (3, "experiment")
    assert sorted(manifest["files"]) == sorted([SERVER, *map(file_name, NAMES)])
