"""A comparison keeps what is finished, goes on with what is not, and survives a system that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from experiment_fixtures import CLIENTS, TINY, checkpoint_bytes, figures, in_a_process, tiny, untimed
from wardround import run_folder, run_queue
from wardround.comparing import compare
from wardround.config import Experiment, experiment_from
from wardround.errors import InputError, RunError
from wardround.experiment import run
from wardround.systems import System, systems_named

SEEDS = range(3, 5)


class Notes:
    """What a watcher was told."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []
        self.rounds: list[tuple[str, int, int]] = []
        self.ends: list[tuple[str, int, str | None]] = []

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """Note the runs that were finished before."""
        if done:
            self.kept.append((label, seed))

    def advanced(self, label: str, seed: int, round: int) -> None:
        """Note a round."""
        self.rounds.append((label, seed, round))

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """Note an end."""
        self.ends.append((label, seed, error))


def systems(*names: str, **changes: Any) -> list[System]:
    """Systems on a tiny experiment of two rounds."""
    return systems_named(tiny(rounds=2, **changes), names)


# ---- names


def test_a_name_is_a_method_a_preset_or_a_variant_with_settings() -> None:
    base = experiment_from(
        TINY
        | {
            "method": {"name": "pafp", "m_loc": 0.5},
            "methods": {"pafp-alt": {"every": 3}},
            "variants": {"slow": {"training": {"lr": 0.001}}, "sgd:alt": {"method": {"name": "pafp-alt"}}},
        },
        "base",
    )
    names = [
        "pafp", "FedAvg", "ft-2B", "pafp-alt", "pafp-alt:every=5:model.head=shared", "slow", "slow:m_loc=0.25",
        "sgd:alt", "isolated:model.backbone=wardround:cnn-bn",
    ]  # fmt: skip
    found = {system.label: system.experiment for system in systems_named(base, names)}
    assert list(found) == names
    assert found["pafp"].method == {"name": "pafp", "m_loc": 0.5}
    assert found["FedAvg"].method == {"name": "fedavg"}
    assert (found["ft-2B"].method, found["ft-2B"].model.finetune_blocks) == ({"name": "fedavg"}, 2)
    assert found["pafp-alt"].method == {"name": "pafp-alt", "every": 3}
    five = found["pafp-alt:every=5:model.head=shared"]
    assert (five.method, five.model.head) == ({"name": "pafp-alt", "every": 5}, "shared")
    assert (found["slow"].method, found["slow"].training.lr) == ({"name": "pafp", "m_loc": 0.5}, 0.001)
    assert found["slow:m_loc=0.25"].method == {"name": "pafp", "m_loc": 0.25}
    assert found["sgd:alt"].method == {"name": "pafp-alt", "every": 3}
    assert found["isolated:model.backbone=wardround:cnn-bn"].model.backbone == "wardround:cnn-bn"


def test_a_variant_goes_before_a_method_of_its_name_however_it_is_typed() -> None:
    changed = {"method": {"name": "fedprox", "mu": 0.5}}
    base = experiment_from(TINY | {"variants": {"fedprox": changed, "Mine": {}, "mine": {"rounds": 9}}}, "base")
    plain, more, exact = systems_named(base, ["FedProx", "FEDPROX:mu=1", "mine"])
    assert (plain.label, plain.experiment.method["mu"]) == ("fedprox", 0.5)
    assert more.experiment.method == {"name": "fedprox", "mu": 1}
    assert (exact.label, exact.experiment.rounds) == ("mine", 9)


def test_ccvr_goes_on_top_of_a_method_by_name() -> None:
    sections = {"fedprox+ccvr": {"mu": 0.25}}
    (system,) = systems_named(experiment_from(TINY | {"methods": sections}, "base"), ["fedprox+ccvr"])
    assert system.experiment.method == {"name": "fedprox+ccvr", "mu": 0.25}
    assert system.experiment.bound_method().name == "fedprox+ccvr"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fedprx+ccvr"], "--methods: there is no method or variant 'fedprx+ccvr'"),
        (["pafpp"], "--methods: there is no method or variant 'pafpp' (did you mean 'pafp'?)"),
        (["pafp:mloc=1"], "--methods pafp:mloc=1: method.mloc: there is no such key (did you mean 'm_loc'?)"),
        (["pafp:m_loc=2"], "--methods pafp:m_loc=2: method.m_loc: expected a number up to 1, found 2"),
        (["fedavg", "fedavg"], "--methods: fedavg and fedavg would share one name; each system needs its own"),
        (["pafp:m_loc=1", "pafp-m_loc=1"], "--methods: there is no method or variant 'pafp-m_loc=1'"),
        ([], "--methods: name at least one method"),
    ],
)
def test_a_wrong_name_is_explained(names: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        systems(*names)
    assert str(caught.value).startswith(message)


def test_labels_that_would_share_a_folder_are_refused() -> None:
    base = experiment_from(TINY | {"variants": {"a/b": {}, "a b": {}}}, "base")
    with pytest.raises(InputError, match="a/b and a b would share one name"):
        systems_named(base, ["a/b", "a b"])


# ---- what a comparison leaves behind


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Notes]:
    """A comparison of two systems over two seeds, two runs at once."""
    folder, notes = tmp_path_factory.mktemp("compare") / "c", Notes()
    comparison = compare(systems("fedavg", "pafp-alt:every=3"), SEEDS, folder, notes, workers=2)
    return folder, comparison, notes


def test_every_run_is_reported_round_by_round(finished: tuple[Path, dict[str, Any], Notes]) -> None:
    _, _, notes = finished
    runs = [(label, seed) for label in ("fedavg", "pafp-alt:every=3") for seed in SEEDS]
    assert notes.kept == []
    assert sorted(notes.ends) == [(label, seed, None) for label, seed in runs]
    assert sorted(notes.rounds) == [(label, seed, round) for label, seed in runs for round in (1, 2)]


def test_results_are_merged_over_seeds(finished: tuple[Path, dict[str, Any], Notes]) -> None:
    folder, comparison, _ = finished
    for label, name in (("fedavg", "fedavg"), ("pafp-alt:every=3", "pafp-alt-every=3")):
        merged = json.loads((folder / name / "results.json").read_text())
        single = [json.loads((folder / name / f"seed-{seed}" / "results.json").read_text()) for seed in SEEDS]
        assert (merged["label"], merged["seeds"]) == (label, list(SEEDS))
        for client in CLIENTS:
            assert merged["clients"][client]["accuracy"] == [
                results["clients"][client]["accuracy"][0] for results in single
            ]
    assert comparison == json.loads((folder / "comparison.json").read_text())
    assert list(comparison["methods"]) == ["fedavg", "pafp-alt:every=3"]
    assert json.loads((folder / "federation.json").read_text())["classes"]
    assert not list(folder.rglob(".lock"))


def test_a_run_of_a_comparison_has_the_bits_of_a_single_run(
    finished: tuple[Path, dict[str, Any], Notes], tmp_path: Path
) -> None:
    folder, _, _ = finished
    alone = systems("pafp-alt:every=3")[0].seeded(4)
    run(alone, tmp_path / "alone", label="pafp-alt:every=3")
    inside = folder / "pafp-alt-every=3" / "seed-4"
    assert checkpoint_bytes(inside) == checkpoint_bytes(tmp_path / "alone")
    assert figures(inside) == figures(tmp_path / "alone")


# ---- a second call


@pytest.fixture
def copy(finished: tuple[Path, dict[str, Any], Notes], tmp_path: Path) -> Path:
    """The finished comparison, to be spoilt."""
    shutil.copytree(finished[0], tmp_path / "c")
    return tmp_path / "c"


def test_finished_runs_are_kept(
    finished: tuple[Path, dict[str, Any], Notes], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(run_queue, "run", fail)
    notes = Notes()
    comparison = compare(systems("fedavg", "pafp-alt:every=3"), SEEDS, copy, notes)
    assert comparison == finished[1]
    assert len(notes.kept) == 4
    assert notes.ends == []


def test_another_seed_and_system_are_added(copy: Path) -> None:
    notes = Notes()
    comparison = compare(systems("fedavg", "pafp-alt:every=3", "isolated"), range(3, 4), copy, notes, workers=2)
    assert notes.kept == [("fedavg", 3), ("pafp-alt:every=3", 3)]
    assert notes.ends == [("isolated", 3, None)]
    assert list(comparison["methods"]) == ["fedavg", "pafp-alt:every=3", "isolated"]
    assert json.loads((copy / "fedavg" / "results.json").read_text())["seeds"] == [3]


def test_more_rounds_extend_the_runs(copy: Path, tmp_path: Path) -> None:
    longer = systems_named(tiny(rounds=3), ["fedavg"])
    notes = Notes()
    compare(longer, range(3, 4), copy, notes)
    assert notes.kept == []
    assert notes.rounds == [("fedavg", 3, 3)]
    run(longer[0].seeded(3), tmp_path / "alone")
    expected = figures(tmp_path / "alone")
    found = figures(copy / "fedavg" / "seed-3")
    assert found["clients"] == expected["clients"]


def test_a_folder_of_another_experiment_is_refused_before_anything_runs(copy: Path) -> None:
    notes = Notes()
    with pytest.raises(InputError) as caught:
        compare(systems("isolated", "fedavg", training__lr=0.5), SEEDS, copy, notes)
    assert str(caught.value) == (
        f"fedavg: {copy}/fedavg/seed-3: belongs to another experiment: training.lr: 0.01 -> 0.5"
    )
    assert notes.ends == []
    assert not (copy / "isolated").exists()


def test_a_choice_made_by_an_earlier_call_is_kept(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test may find another setting faster today: the finished runs are no other experiment for that."""
    undecided = systems("fedavg", training__memory_format="auto")
    monkeypatch.setattr(run_queue, "run", None)
    notes = Notes()
    compare(undecided, SEEDS, copy, notes)
    assert notes.kept == [("fedavg", 3), ("fedavg", 4)]


# ---- failures


def test_a_failing_run_does_not_lose_the_others(tmp_path: Path) -> None:
    named = systems("fedavg", "isolated", "fedavg:training.lr=1e20:training.clip_norm=none")
    notes = Notes()
    with pytest.raises(RunError) as caught:
        compare(named, range(3, 4), tmp_path / "c", notes, workers=2)
    assert str(caught.value).startswith("fedavg:training.lr=1e20:training.clip_norm=none, seed 3: round ")
    comparison = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert list(comparison["methods"]) == ["fedavg", "isolated"]
    assert (tmp_path / "c" / "fedavg" / "results.json").exists()
    failed = [label for label, _, error in notes.ends if error]
    assert failed == ["fedavg:training.lr=1e20:training.clip_norm=none"]


def test_a_run_whose_process_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(experiment: Experiment, folder: Path, **rest: Any) -> None:
        if experiment.method["name"] == "isolated":
            os._exit(7)
        run(experiment, folder, **rest)

    monkeypatch.setattr(run_queue, "run", die)
    with pytest.raises(RunError, match=r"^isolated, seed 3: its process died \(exit code 7\)$"):
        compare(systems("isolated", "fedavg"), range(3, 4), tmp_path / "c", Notes(), workers=2)
    assert list(json.loads((tmp_path / "c" / "comparison.json").read_text())["methods"]) == ["fedavg"]


def test_an_error_that_nobody_foresaw_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(run_queue, "run", fail)
    with pytest.raises(RunError, match=r"^fedavg, seed 3: ZeroDivisionError: by zero$"):
        compare(systems("fedavg"), range(3, 4), tmp_path / "c", Notes())
    assert not (tmp_path / "c" / "comparison.json").exists()


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["isolated", "pafp:groups=7"], {}, "pafp:groups=7: GroupNorm groups = 7 does not divide 64 channels"),
        (["isolated"], {"model__finetune_blocks": 9}, "isolated: model.finetune_blocks = 9: "),
        (["fedavg", "isolated:data.phantoms.test_per_client=7"], {}, "isolated:data.phantoms.test_per_client=7: its"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    names: list[str], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    notes = Notes()
    with pytest.raises(InputError) as caught:
        compare(systems(*names, **changes), SEEDS, tmp_path / "c", notes)
    assert str(caught.value).startswith(message)
    assert notes.ends == []


def test_an_unknown_reference_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--reference fedagv: .* \(did you mean 'fedavg'\?\)"):
        compare(systems("fedavg"), SEEDS, tmp_path / "c", Notes(), reference="fedagv")
    assert not (tmp_path / "c").exists()


def test_a_single_runs_folder_is_no_place_for_a_comparison(
    finished: tuple[Path, dict[str, Any], Notes],
) -> None:
    with pytest.raises(InputError, match="holds a single run, not a comparison"):
        compare(systems("fedavg"), SEEDS, finished[0] / "fedavg" / "seed-3", Notes())


# ---- interruption


def _interrupting(number: int) -> Notes:
    """A watcher that sends a signal to its own process alone after the first round of all."""

    class Once(Notes):
        def advanced(self, label: str, seed: int, round: int) -> None:
            os.kill(os.getpid(), number)

    return Once()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_comparison_goes_on(
    number: int, finished: tuple[Path, dict[str, Any], Notes], tmp_path: Path
) -> None:
    folder, named = tmp_path / "c", systems("fedavg", "pafp-alt:every=3")

    def work() -> None:
        try:
            compare(named, SEEDS, folder, _interrupting(number), workers=2)
        except KeyboardInterrupt:
            os._exit(130)

    assert in_a_process(work) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 30
    while list(folder.rglob(run_folder.LOCK)) and time.monotonic() < deadline:
        time.sleep(0.05)  # runs that have lost their comparison wind up by themselves
    comparison = compare(named, SEEDS, folder, Notes(), workers=2)
    assert untimed(comparison) == untimed(finished[1])
    for name in ("fedavg", "pafp-alt-every=3"):
        for seed in SEEDS:
            place = Path(name) / f"seed-{seed}"
            assert checkpoint_bytes(folder / place) == checkpoint_bytes(finished[0] / place)
