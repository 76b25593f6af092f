"""The command `unseen-modality`, from one end to the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_fixtures import refused, rows, wardround
from experiment_fixtures import tiny, tiny_file
from wardround import unseen_transfer
from wardround.data.read import read_federation
from wardround.evaluation.results import over_seeds
from wardround.experiment import set_up
from wardround.federation.checkpoints import Checkpoints
from wardround.unseen import FewImages, few_images
from wardround.unseen_study import figures
from wardround.unseen_transfer import fine_tune, learned_state

CHANGES: dict[str, Any] = {
    "data__phantoms__family": "mixed",
    "model__finetune_blocks": "all",
    "rounds": 1,
    "data__phantoms__train_per_client": 18,
}
ASKED = ("--leave-out", "fundus", "--methods", "fm2,isolated", "--seeds", 1, "--fraction", 0.3, "--epochs", 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command has run once; the file lies beside it."""
    home = tmp_path_factory.mktemp("unseen")
    tiny_file(home, **CHANGES)
    result = wardround("unseen-modality", home / "tiny.toml", *ASKED, "--out", home / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    return home / "out"


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def run_of(folder: Path, method: str) -> Path:
    return folder / "fundus" / method / "seed-3"


def few(fraction: float = 0.3) -> FewImages:
    return few_images(read_federation(tiny(**CHANGES).data, 3), "fundus", fraction, 3)


def test_the_federation_never_had_it(finished: Path) -> None:
    """Neither its images nor its clients nor its classes are in the record of the run."""
    for method in ("fm2", "isolated"):
        roster = read(run_of(finished, method) / "federation.json")
        assert roster["modalities"] == ["dermoscopy", "xray"]
        assert len(roster["classes"]) == 6
        assert not any("fundus" in name for name in roster["classes"])
        assert [sum(client["counts"]["train"]) for client in roster["clients"]] == [18, 18]
        assert "without the images of one modality: fundus" in roster["notes"]


def test_all_methods_learn_from_the_same_images(finished: Path) -> None:
    """5.4 of 18 are 5, of three classes; all six test images of the family's client."""
    names = {method: read(run_of(finished, method) / "unseen.json")["names"] for method in ("fm2", "isolated")}
    assert names["fm2"] == names["isolated"] == list(few().client.train.names)
    images = read(run_of(finished, "fm2") / "unseen.json")["images"]
    assert sum(images["used"].values()) == 5
    assert (set(images["pool"].values()), set(images["test"].values())) == ({6}, {2})
    assert all(images["used"].values())


def test_what_is_written(finished: Path) -> None:
    record, page = read(finished / "unseen.json"), (finished / "unseen.md").read_text()
    (part,) = record["modalities"]
    assert [system["label"] for system in part["systems"]] == ["fm2", "isolated"]
    for system in part["systems"]:
        one = read(run_of(finished, system["label"]) / "unseen.json")
        for figure in ("accuracy", "balanced_accuracy"):
            values = [one[start][figure] for start in ("federation", "scratch")]
            assert [system[start][figure]["mean"] for start in ("federation", "scratch")] == values
            assert system["difference"][figure]["mean"] == pytest.approx(values[0] - values[1])
        cells = rows(page, "A modality that the federation never saw. ")[f"fundus: {system['label']}"]
        assert cells["accuracy, from scratch"] == f"{100 * one['scratch']['accuracy']:.1f}"
        assert one["scratch"]["n"] == 6
    assert rows(page, "Images of each class")["fundus: fundus: drusen"]["of"] == "6"


def test_a_second_time_nothing_is_done(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and transfers stay as they are, until a transfer is asked for that is not there."""
    files = {file: file.stat().st_mtime_ns for file in (finished / "fundus").rglob("*") if file.is_file()}
    tuned: list[int] = []
    monkeypatch.setattr(unseen_transfer, "fine_tune", lambda *given: tuned.append(given[2]) or 1 / 0)
    again = ("unseen-modality", finished.parent / "tiny.toml", "--out", finished, *ASKED)
    assert wardround(*again).exit_code == 0
    assert {file: file.stat().st_mtime_ns for file in files} == files
    with pytest.raises(ZeroDivisionError):
        wardround(*again, "--epochs", 3)
    assert tuned == [3]


def test_a_client_alone_gives_the_mean_of_all(finished: Path) -> None:
    """What no server has is averaged over clients, each the same; what it has is the server's."""
    folder = run_of(finished, "isolated")
    checkpoint = Checkpoints(folder / "checkpoints", None).latest()
    assert checkpoint is not None
    assert not checkpoint.server().state
    clients = [checkpoint.client(client["name"]) for client in read(folder / "federation.json")["clients"]]
    learned = learned_state(folder)
    name = next(name for name in learned if name.startswith("tuned.") and name.endswith("weight"))
    first, second = (client[f"state/{name}"] for client in clients)
    assert not torch.equal(first, second)
    torch.testing.assert_close(learned[name], (first + second) / 2)

    shared = Checkpoints(run_of(finished, "fm2") / "checkpoints", None).latest()
    assert shared is not None
    assert torch.equal(learned_state(run_of(finished, "fm2"))[name], shared.server().state[name])


@pytest.mark.parametrize("method", ["fm2", "fedavg"])
def test_starts_differ_in_nothing_else(method: str) -> None:
    """Begun with its own initial weights, the network ends where it ends from scratch; with others, it does not."""
    experiment, images = tiny(**CHANGES, method__name=method, training__lr=0.01), few()
    initial = {name: t.clone() for name, t in set_up(experiment, images.federation).model.state_dict().items()}
    own = {name: t for name, t in initial.items() if not name.startswith("extras.")}
    scratch, same = fine_tune(experiment, images, 2, None), fine_tune(experiment, images, 2, own)
    other = fine_tune(experiment, images, 2, {name: t * 1.5 for name, t in own.items()})
    assert scratch.loss == same.loss != other.loss
    assert scratch.metrics == same.metrics
    assert scratch.taken == 0 < same.taken < same.trained == scratch.trained


def test_everything_is_tuned() -> None:
    """More epochs on a few easy images bring the loss down: the whole of them is learned by heart."""
    experiment, images = tiny(**CHANGES, method__name="fm2", training__lr=0.05, training__momentum=0.9), few()
    short, long = fine_tune(experiment, images, 1, None), fine_tune(experiment, images, 20, None)
    assert long.loss < short.loss
    assert long.trained > 100_000


def test_figures_over_seeds() -> None:
    """Differences are taken within a seed: their deviation is not that of either side."""
    accuracies = {0: (0.5, 0.25), 1: (0.75, 0.5)}
    done = {
        seed: {
            start: {"accuracy": value, "balanced_accuracy": value}
            for start, value in zip(("federation", "scratch"), pair, strict=True)
        }
        | {"parameters": {"trained": 2, "taken": 1}}
        for seed, pair in accuracies.items()
    }
    found = figures(done)
    assert found["difference"]["accuracy"] == {"values": [0.25, 0.25], "mean": 0.25, "std": 0.0}
    assert found["federation"]["accuracy"]["std"] == pytest.approx(np.std([0.5, 0.75], ddof=1))
    assert found["scratch"]["accuracy"]["mean"] == over_seeds([0.25, 0.5])["mean"] == 0.375


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--leave-out", "ct"], "ct: phantoms (mixed) has no such modality (it has dermoscopy, fundus, xray)"),
        (["--fraction", "0"], "--fraction 0: expected a share in (0, 1]"),
        (["--epochs", "0"], "--epochs 0: expected 1 or more"),
        (["--methods", "fm2,fedavg:data.image_size=16"], "16: its data.* keys are not those of fm2"),
        (["--set", "captions.provider=template"], 'set captions.provider = "none"'),
        (["--methods", "facmic"], "facmic: "),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    """Before anything is trained or a folder made."""
    file, out = tiny_file(tmp_path, **CHANGES), tmp_path / "out"
    assert words in refused("unseen-modality", file, *arguments, "--out", out)
    assert not out.exists()


def test_another_experiment_or_folder(finished: Path, tmp_path: Path) -> None:
    changed = ("unseen-modality", finished.parent / "tiny.toml", *ASKED, "--out")
    assert "belongs to another experiment" in refused(*changed, finished, "--set", "training.lr=0.5")
    (tmp_path / "study.json").write_text("{}")
    assert "holds other runs" in refused(*changed, tmp_path)
