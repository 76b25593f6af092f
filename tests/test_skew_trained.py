"""Features before and after training: what makes the two comparable, and what a finished run says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiment_fixtures import CLIENTS, tiny
from wardround.cli import app
from wardround.data.read import read_federation
from wardround.data.transforms import centre_crop
from wardround.errors import InputError
from wardround.experiment import run
from wardround.measuring_trained import measure_trained, runs_in
from wardround.models.classifier import Classifier, build_classifier
from wardround.report.page import write_report
from wardround.report.pictures import save_trained
from wardround.skew.mmd import Variant, mmd_matrix
from wardround.skew.trained import Course, Distances, beyond_training, describe, distances, sentence
from wardround.using import load_trained

LABELS = {name: np.arange(20) % 2 for name in "abc"}


def made_up() -> dict[str, np.ndarray]:
    """Three clients' features, moved apart."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(0.5 * k, 1, (20, 3)) for k, name in enumerate("abc")}


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_a_matrix_does_not_change_with_the_unit_of_the_features(scale: float) -> None:
    """Scaled, turned and shifted features have the same distances: shrinking everything gains nothing."""
    features = made_up()
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    moved = {name: scale * rows @ turned + 5 for name, rows in features.items()}
    one, other = (distances(found, LABELS, Variant()) for found in (features, moved))
    np.testing.assert_allclose(one.plain, other.plain, atol=1e-9)
    np.testing.assert_allclose(one.same_labels, other.same_labels, atol=1e-9)
    nearer = {name: rows - 0.9 * rows.mean(axis=0) for name, rows in features.items()}
    assert distances(nearer, LABELS, Variant()).plain[0, 2] < one.plain[0, 2] / 1.5


def course(before: list[float], after: list[list[float]]) -> dict[str, Any]:
    """A method whose three pairs (0, 1), (0, 2), (1, 2) have the given distances, one list a run."""

    def both(values: list[float]) -> Distances:
        matrix = np.zeros((3, 3))
        matrix[np.triu_indices(3, 1)] = values
        return Distances(matrix + matrix.T, (matrix + matrix.T) / 2)

    return describe(Course("m", [both(before)] * len(after), [both(values) for values in after]))


def test_the_change_by_hand() -> None:
    """Two runs: means of the pairs are 0.1, 0.4 and 0.3, where 0.2, 0.3 and 0.301 were."""
    found = course([0.2, 0.3, 0.301], [[0.1, 0.5, 0.3], [0.1, 0.3, 0.3]])
    assert found["after"][0][1:] == pytest.approx([0.1, 0.4])
    assert found["change"] == pytest.approx({"before": 0.267, "after": 0.8 / 3, "pairs": 3, "nearer": 1, "further": 1})
    assert found["same_labels_change"]["after"] == pytest.approx(0.4 / 3)
    assert "stayed" in sentence(found)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            [0.1, 0.1, 0.1],
            "m: the mean distance shrank, 0.200 before and 0.100 after training; 3 of 3 pairs came nearer",
        ),
        ([0.3, 0.3, 0.3], "m: the mean distance grew, 0.200 before and 0.300 after training; 0 of 3 pairs came nearer"),
        ([np.nan] * 3, "m: no pair of clients can be compared."),
    ],
)
def test_the_change_in_words(after: list[float], words: str) -> None:
    assert sentence(course([0.2, 0.2, 0.2], [after])).startswith(words)


def test_what_a_method_adds_is_told_from_training_alone() -> None:
    """Isolated training ends at 0.1, the method at 0.25; without isolated training nothing can be said."""
    alone, method = course([0.3] * 3, [[0.1] * 3]) | {"label": "isolated"}, course([0.3] * 3, [[0.25] * 3])
    (said,) = beyond_training([method, alone])
    assert said.endswith("ends at a mean distance of 0.100. Compared with that: m +0.150.")
    assert beyond_training([method]) == beyond_training([alone]) == []
    assert beyond_training([course([0.3] * 3, [[np.nan] * 3]), alone]) == []


# ---- finished runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison's folders: a network that cannot move but for its head, and one that trains."""
    root = tmp_path_factory.mktemp("runs")
    still = tiny(rounds=1, model__finetune_blocks=0, training__cache=False)
    moving = tiny(rounds=2, method__name="pafp", training__lr=0.05, training__cache=False)
    run(still, root / "still" / "seed-3", label="still")
    run(moving, root / "moving" / "seed-3", label="moving")
    return root


def test_a_network_that_did_not_train_has_the_same_matrix(runs: Path) -> None:
    (system,) = measure_trained([runs / "still" / "seed-3"])["systems"]
    np.testing.assert_allclose(np.array(system["after"], float), np.array(system["before"], float), atol=1e-6)
    assert (system["change"]["nearer"], system["change"]["further"], system["change"]["pairs"]) == (0, 0, 3)


def own_features(model: Classifier, images: np.ndarray, size: int) -> np.ndarray:
    """Pooled features of images, without any of the measuring code."""
    with torch.inference_mode():
        h = model.frozen(model.normalise(torch.from_numpy(centre_crop(images, size).copy())))
        for before, block in zip(model.before, model.tuned, strict=True):
            h = block(before(h))
        return np.asarray(model.pool(h))


@pytest.mark.parametrize("which", ["personal", "server"])
def test_each_client_has_its_own_network_and_images(runs: Path, which: Any) -> None:
    """Both matrices equal those from networks and images put together by hand."""
    folder = runs / "moving" / "seed-3"
    trained = load_trained(folder, CLIENTS[0], which)
    data = read_federation(trained.experiment.data, trained.experiment.seed)
    fresh = build_classifier(trained.experiment.model, 3, 3, 32, trained.experiment.seed).eval()
    tests = {name: data.client(name).test.images for name in CLIENTS}
    before = {name: own_features(fresh, images, 32) for name, images in tests.items()}
    after = {name: own_features(load_trained(folder, name, which).model, tests[name], 32) for name in CLIENTS}
    found = measure_trained([folder], which=which)
    (system,) = found["systems"]
    np.testing.assert_allclose(np.array(system["before"], float), mmd_matrix(before), atol=1e-5)
    np.testing.assert_allclose(np.array(system["after"], float), mmd_matrix(after), atol=1e-5)
    assert np.abs(np.subtract(system["after"], system["before"])).max() > 0.01
    assert found["clients"] == list(CLIENTS)


def test_images_variant_and_split_are_the_caller_s(runs: Path) -> None:
    folder = [runs / "moving" / "seed-3"]
    plain = measure_trained(folder, max_images=4)["systems"][0]["after"]
    squared = measure_trained(folder, max_images=4, variant=Variant(squared=True))["systems"][0]["after"]
    np.testing.assert_allclose(np.square(plain), squared, atol=1e-9)
    assert plain != measure_trained(folder, max_images=4, split="train")["systems"][0]["after"]


def test_folders_are_runs_or_comparisons(runs: Path, tmp_path: Path) -> None:
    assert [label for label, _ in runs_in([runs])] == ["moving", "still"]
    assert [label for label, _ in runs_in([runs / "still" / "seed-3", runs])] == ["still", "moving", "still"]
    with pytest.raises(InputError, match="holds no finished run"):
        runs_in([runs, tmp_path])


def test_runs_of_other_federations_are_refused(runs: Path, tmp_path: Path) -> None:
    run(tiny(rounds=1, data__phantoms__clients=2), tmp_path / "two")
    with pytest.raises(InputError, match="its clients are site-01, site-02, but before it site-01"):
        measure_trained([runs / "still" / "seed-3", tmp_path / "two"])


# ---- the command


def wardround(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_skew_of_a_comparison_is_printed_drawn_and_reported(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(runs, folder)
    said = wardround("skew", folder)
    assert said.exit_code == 0, said.output
    for part in ("moving: the mean distance", "still: the mean distance stayed", "site-01, site-03", "test images"):
        assert part in said.stdout, part
    found = json.loads((folder / "skew" / "trained.json").read_text())
    assert [system["label"] for system in found["systems"]] == ["moving", "still"]
    assert (folder / "skew" / "trained.png").read_bytes().startswith(b"\x89PNG")
    page = write_report(folder).read_text()
    assert "before and after training" in page
    assert page.count("moving, after training</figcaption>") == 1
    assert "still, before training): The" not in page


def test_the_command_writes_where_it_is_told_and_refuses_what_has_no_meaning(runs: Path, tmp_path: Path) -> None:
    one, other = runs / "still" / "seed-3", runs / "moving" / "seed-3"
    said = wardround("skew", other, other, "--out", tmp_path / "here", "--model", "server", "--json")
    found = json.loads(said.stdout)
    assert found == json.loads((tmp_path / "here" / "trained.json").read_text())
    assert (found["model"], found["systems"][0]["runs"]) == ("server", 2)
    alone = wardround("skew", one, "--out", tmp_path / "here", "--model", "server")
    assert (alone.exit_code, "its server has no model" in alone.stderr) == (2, True)
    refused = wardround("skew", one, "--set", "rounds=3")
    assert refused.exit_code == 2
    assert "--set: finished runs are measured as they were" in refused.stderr
    two = wardround("skew", tmp_path / "a.toml", tmp_path / "b.toml")
    assert (two.exit_code, "one experiment file at a time" in two.stderr) == (2, True)


def test_a_picture_of_clients_that_cannot_be_compared(tmp_path: Path) -> None:
    nothing = [[None, None], [None, None]]
    found = {"clients": ["a", "b"], "systems": [{"label": "m", "before": nothing, "after": nothing}]}
    save_trained(tmp_path / "new" / "p.svg", found)
    assert "<svg" in (tmp_path / "new" / "p.svg").read_text()
