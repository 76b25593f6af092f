"""Runs that are packed into a file and brought back go for finished, and say the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiment_fixtures import CLIENTS, tiny
from study_scripts import study
from wardround.comparing import compare
from wardround.evaluation.predictions import read_predictions
from wardround.systems import systems_named

keep = study("keep")
SEEDS = (4, 5)


class Silent:
    """Watches a comparison and says nothing."""

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """Nothing."""

    def advanced(self, label: str, seed: int, round: int) -> None:
        """Nothing."""

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """A run that fails is no comparison."""
        assert error is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two systems over two seeds."""
    folder = tmp_path_factory.mktemp("keep") / "runs"
    compare(systems_named(tiny(rounds=1), ["fedavg", "isolated"]), SEEDS, folder, Silent(), workers=2)
    return folder


def test_a_comparison_of_unpacked_runs_trains_nothing_and_says_the_same(finished: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "runs.tar.xz", tmp_path / "back"
    assert keep.pack(finished, file) == [f"{name}/seed-{seed}" for name in ("fedavg", "isolated") for seed in SEEDS]
    keep.unpack(file, back)
    assert not list(back.rglob("*.safetensors")), "no weights"
    before = {path: path.stat().st_mtime_ns for path in back.rglob("seed-*/*")}
    again = compare(systems_named(tiny(rounds=1), ["fedavg", "isolated"]), SEEDS, back, Silent(), workers=2)
    assert again == json.loads((finished / "comparison.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in back.rglob("seed-*/*")} == before


def test_decisions_are_kept_and_not_probabilities(finished: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "runs.tar.xz", tmp_path / "back"
    keep.pack(finished, file)
    keep.unpack(file, back)
    for key in ("personal", "received"):
        then, now = (read_predictions(place / "fedavg" / "seed-4", key) for place in (finished, back))
        for client in CLIENTS:
            np.testing.assert_array_equal(then[client][1].argmax(1), now[client][1].argmax(1))
            assert set(np.unique(now[client][1])) <= {0, 1}


def test_nothing_of_the_machine_is_kept(finished: Path, tmp_path: Path) -> None:
    keep.pack(finished, tmp_path / "runs.tar.xz")
    contents = keep.read(tmp_path / "runs.tar.xz")
    environment = json.loads(contents["fedavg/seed-4/environment.json"])
    assert "platform" not in environment
    assert environment["torch"]
    place = 'path = "/home/somebody/images/ham"'
    assert keep._impersonal("config.toml", f"[data]\n{place}\n") == '[data]\npath = "ham"\n'


def test_packing_again_adds_and_replaces(finished: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "runs.tar.xz", tmp_path / "other"
    keep.pack(finished, file)
    keep.unpack(file, other)
    (other / "isolated").rename(other / "renamed")
    (other / "fedavg" / "seed-4" / "metrics.jsonl").write_text("{}\n")
    names = keep.pack(other, file)
    assert names == [f"{name}/seed-{seed}" for name in ("fedavg", "isolated", "renamed") for seed in SEEDS]
    contents = keep.read(file)
    assert contents["fedavg/seed-4/metrics.jsonl"] == b"{}\n"
    assert contents["isolated/seed-5/results.json"] == contents["renamed/seed-5/results.json"]


def test_unpacking_leaves_finished_runs_alone(finished: Path, tmp_path: Path) -> None:
    keep.pack(finished, tmp_path / "runs.tar.xz")
    back = tmp_path / "back"
    keep.unpack(tmp_path / "runs.tar.xz", back)
    metrics = back / "fedavg" / "seed-4" / "metrics.jsonl"
    metrics.write_text("mine")
    keep.unpack(tmp_path / "runs.tar.xz", back)
    assert metrics.read_text() == "mine"
