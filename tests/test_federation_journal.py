"""A client's journal: it answers a message with the state of the exchange before it, whatever has happened since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from wardround.errors import RunError
from wardround.federation.journal import Journal
from wardround.federation.store import file_name


def visit(
    journal: Journal, round: int, exchange: int | None = 0, resumable: int = 0, client: str = "a"
) -> float | None:
    """What the client answers with, before it keeps anything."""
    scalars: dict[str, Any] = {"round": round, "resumable": resumable}
    journal.begin(client, scalars if exchange is None else {**scalars, "exchange": exchange})
    state = journal.get(client)
    return float(state["w"]) if state else None


def keep(journal: Journal, value: float, client: str = "a") -> None:
    journal.put(client, {"w": torch.tensor(value)})


def test_the_state_is_that_of_the_exchange_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert visit(journal, 1) is None
    keep(journal, 1.0)
    assert float(journal.get("a")["w"]) == 1.0, "once kept, it is what is read"
    assert visit(journal, 1, exchange=1) == 1.0
    keep(journal, 1.5)
    assert visit(journal, 2) == 1.5
    assert visit(journal, 9, exchange=None) == 1.5, "the last evaluation"
    assert visit(journal, 2, client="b") is None


def test_a_message_that_comes_again_finds_what_it_found(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        journal = Journal(tmp_path)  # a restart each time
        assert visit(journal, int(value)) == (value - 1 or None)
        keep(journal, value)
    assert visit(Journal(tmp_path), 2) == 1.0, "the server has gone back"
    again = Journal(tmp_path)
    assert visit(again, 3) == 2.0
    keep(again, 3.0)
    assert visit(Journal(tmp_path), 4) == 3.0


def test_what_nobody_can_go_back_to_is_deleted(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for round in range(1, 8):
        visit(journal, round, resumable=max(0, round - 3))
        keep(journal, float(round))
    assert journal.places("a") == [(4, 0), (5, 0), (6, 0), (7, 0)]
    assert visit(journal, 5) == 4.0


def test_a_client_that_was_away_keeps_its_last_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    visit(journal, 1)
    keep(journal, 1.0)
    assert visit(journal, 20, resumable=18) == 1.0
    keep(journal, 20.0)
    assert journal.places("a") == [(1, 0), (20, 0)]


def test_a_checkpoint_has_the_state_after_the_exchange(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state")
    visit(journal, 1)
    journal.save("a", tmp_path / "empty", {})
    assert not (tmp_path / "empty").exists()
    keep(journal, 1.0)
    journal.save("a", tmp_path / "full", {"extra": torch.zeros(1)})
    assert safetensors.torch.load_file(tmp_path / "full" / file_name("a")).keys() == {"w", "extra"}


def test_damage_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    visit(journal, 1)
    keep(journal, 1.0)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(RunError, match=r"00001-00\.safetensors: the client's state is damaged"):
        visit(journal, 2)


def test_a_write_that_a_crash_cut_short_is_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    visit(journal, 1)
    keep(journal, 1.0)
    (file,) = tmp_path.rglob("*.safetensors")
    (file.parent / f".{file.name}.123").write_bytes(b"half")
    assert Journal(tmp_path).places("a") == [(1, 0)]
