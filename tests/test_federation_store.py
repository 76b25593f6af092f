"""Local state in memory and on disk, and files that are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from wardround.federation.files import checksum, uninterrupted, write_atomically
from wardround.federation.store import ClientStore, file_name

KILOBYTE = 1024


def state(value: float) -> dict[str, torch.Tensor]:
    """One kilobyte."""
    return {"w": torch.full((256,), float(value))}


def on_disk(store: ClientStore) -> set[str]:
    """The clients whose state was spilled."""
    return {path.name.removeprefix("client-").removesuffix(".safetensors") for path in store.folder.iterdir()}


def test_an_unknown_client_has_no_state_and_no_file(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state", 0)
    assert store.get("a") == {}
    store.save("a", tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_states_stay_in_memory_within_the_budget(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state", 3 * KILOBYTE)
    for number, client in enumerate("abc"):
        store.put(client, state(number))
    assert not (tmp_path / "state").exists()
    assert [store.get(client)["w"][0].item() for client in "abc"] == [0, 1, 2]


def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 3 * KILOBYTE)
    for number, client in enumerate("abc"):
        store.put(client, state(number))
    store.get("a")
    store.put("d", state(3))
    assert on_disk(store) == {"b"}
    store.put("c", state(4))
    store.put("e", state(5))
    assert on_disk(store) == {"a", "b"}
    assert {client: store.get(client)["w"][0].item() for client in "abcde"} == {"a": 0, "b": 1, "c": 4, "d": 3, "e": 5}


def test_replacing_a_state_frees_its_room(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 2 * KILOBYTE)
    for number in range(5):
        store.put("a", state(number))
    store.put("b", state(9))
    assert not list(tmp_path.iterdir())
    store.put("a", {"w": torch.zeros(512)})
    assert on_disk(store) == {"b"}


def test_a_newer_state_wins_over_a_spilled_one(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, KILOBYTE)
    store.put("a", state(1))
    store.put("b", state(2))
    store.put("a", state(3))
    store.put("b", state(4))
    assert [store.get(client)["w"][0].item() for client in "ab"] == [3, 4]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 700)), max_size=30))
def test_any_budget_remembers_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool, int]]
) -> None:
    stores = [ClientStore(tmp_path_factory.mktemp("store"), budget) for budget in (0, 1500, 10**9)]
    expected: dict[str, int] = {}
    for client, writes, size in steps:
        for store in stores:
            if writes:
                store.put(client, {"w": torch.arange(size)})
            else:
                found = store.get(client)
                assert list(found) == (["w"] if client in expected else [])
                assert not found or torch.equal(found["w"], torch.arange(expected[client]))
        if writes:
            expected[client] = size


@pytest.mark.parametrize("budget", [0, 10**6])
def test_what_is_handed_out_is_a_copy(budget: int, tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget)
    mine = state(1)
    store.put("a", mine)
    mine["w"].zero_()
    store.get("a")["w"].fill_(7)
    store.get("a")["extra"] = torch.ones(1)
    assert store.get("a").keys() == {"w"}
    assert store.get("a")["w"].unique().tolist() == [1]


def test_leftovers_of_another_run_or_worker_are_not_read_nor_written(tmp_path: Path) -> None:
    killed, other = ClientStore(tmp_path, 0), ClientStore(tmp_path, 0)
    killed.put("a", state(1))
    assert other.get("a") == {}
    other.put("a", state(2))
    assert killed.get("a")["w"][0].item() == 1


def test_types_and_layouts_survive_the_disk(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 0)
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    tensors = {"f": image, "h": image.half(), "n": torch.tensor(7), "b": torch.tensor([True]), "e": torch.zeros(0, 3)}
    store.put("a", tensors | {"alias": image})
    got = store.get("a")
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


@pytest.mark.parametrize("budget", [0, 10**6])
def test_saving_for_a_checkpoint(budget: int, tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state", budget)
    store.put("St. Mary's / A", state(1))
    store.save("St. Mary's / A", tmp_path / "round", {"personal/w": torch.ones(2)})
    saved = safetensors.torch.load_file(tmp_path / "round" / "client-St.%20Mary%27s%20%2F%20A.safetensors")
    assert saved.keys() == {"w", "personal/w"}
    fresh = ClientStore(tmp_path / "other", budget)
    fresh.put("St. Mary's / A", saved)
    assert torch.equal(fresh.get("St. Mary's / A")["w"], state(1)["w"])


ODD = [
    "",
    ".",
    "..",
    "../../etc",
    "a/b",
    "a\\b",
    "a b",
    "a%20b",
    "Zürich",
    "東京" * 60,
    "x" * 300,
    "x" * 301,
    "\x00",
    "~",
]


def test_odd_names_are_files_of_one_folder_each_its_own(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "inner", 0)
    for number, name in enumerate(ODD):
        store.put(name, state(number))
    assert [store.get(name)["w"][0].item() for name in ODD] == list(range(len(ODD)))
    assert len(list(store.folder.iterdir())) == len(ODD)
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


@given(st.text(max_size=300), st.text(max_size=300))
def test_file_names_are_short_plain_and_distinct(one: str, other: str) -> None:
    name = file_name(one)
    assert name.isascii()
    assert "/" not in name
    assert len(name) <= 200
    assert (name == file_name(other)) == (one == other)


# ---- files


def test_writing_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "c.bin"
    write_atomically(file, b"one")
    write_atomically(file, b"two", durable=False)
    assert file.read_bytes() == b"two"
    assert list(file.parent.iterdir()) == [file]
    assert checksum(file) == hashlib.sha256(b"two").hexdigest()


class _FullDisk:
    """A file that takes half of what it is given."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *details: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        """Half, then no space."""
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    write_atomically(file, b"old")
    opening = Path.open

    def refuse(*details: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if where == "write":
        monkeypatch.setattr(Path, "open", lambda self, *args: _FullDisk(opening(self, *args)))
    else:
        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left|Read-only"):
        write_atomically(file, b"new and longer")
    monkeypatch.undo()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with uninterrupted():
            interrupt()
            interrupt()
            done.append("block")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["block"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_handler_before_is_called_once_and_is_back_again() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            interrupt()
            interrupt()
            assert heard == []
        assert heard == [signal.SIGINT]
        interrupt()
        assert heard == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_inside_the_block_is_still_an_error() -> None:
    def block() -> None:
        with uninterrupted():
            raise LookupError

    with pytest.raises(LookupError):
        block()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_need_no_protection() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            done.append("block")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["block"]
