"""What networks make of test images: figures by hand, FM²'s parts, and the pictures of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from command_fixtures import refused, rows, wardround
from experiment_fixtures import tiny_file
from linear_trial import loaded
from wardround.config import load_experiment
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS
from wardround.methods.fedper import FedPer
from wardround.methods.fm2 import DOMAIN, FM2, mixtures
from wardround.methods.trial import Network, Trial
from wardround.report.embedding_picture import colourings
from wardround.report.pictures import SERIES
from wardround.report.svg import MARKERS
from wardround.skew.interleaving import apart, flattened, nested, notes, same_neighbours

WHOLE = Network("wardround:resnet4-lib", 16, "all", head="shared", dropout=0.0)
MIXED = {
    "data__phantoms__family": "mixed",
    "data__phantoms__classes": 2,
    "model__finetune_blocks": "all",
    "method__name": "fm2",
    "rounds": 1,
    "training__lr": 0.1,
}

# ---- figures


def test_how_far_groups_lie_apart_by_hand() -> None:
    """On a line at 0, 1 and 4, 5. Silhouettes: (4.5 - 1) / 4.5 at the ends, (3.5 - 1) / 3.5 between; here the picture
    has one image of each group on either side, so that the nearest ones are of the other."""
    line, groups = np.array([[0.0], [1.0], [4.0], [5.0]]), np.array([3, 3, 7, 7])
    mixed = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 1.0], [9.0, 1.0]])
    found = apart(line, mixed, groups)
    assert found["silhouette"] == pytest.approx((2 * 3.5 / 4.5 + 2 * 2.5 / 3.5) / 4)
    near = (1 + 82**0.5) / 2  # mean distance to the other group; its own is 9 away
    assert found["picture_silhouette"] == pytest.approx((near - 9) / 9)
    assert found["by_chance"] == pytest.approx(2 * 2 / 12)
    assert found["same_neighbours"] == pytest.approx(1 / 3)  # all three others are among the ten nearest
    assert same_neighbours(line, groups, 1) == 1.0
    assert same_neighbours(mixed, groups, 1) == 0.0


def test_without_two_groups_there_is_nothing_to_say() -> None:
    line = np.arange(4.0)[:, None]
    for groups in (np.zeros(4, np.int64), np.arange(4)):
        assert set(apart(line, np.tile(line, 2), groups).values()) == {None}


def test_flattening_keeps_neighbours_and_repeats() -> None:
    stream = np.random.default_rng(0)
    clouds = np.concatenate([stream.normal(centre, 0.1, (12, 5)) for centre in (-5, 5)]).astype(np.float32)
    picture = flattened(clouds, 30.0, seed=4)
    assert picture.shape == (24, 2)
    assert same_neighbours(picture, np.repeat([0, 1], 12), 5) == 1.0
    assert np.array_equal(picture, flattened(clouds, 30.0, seed=4))
    assert not flattened(np.ones((9, 5)), 30.0, seed=4).any()


def test_classes_of_one_modality_each_are_told() -> None:
    """And that clients have networks of their own, unless all images go through the server's."""
    classes, modalities = np.array([0, 0, 1, 2]), np.array([1, 1, 1, 0])
    assert nested(classes, modalities)
    assert not nested(classes, np.array([1, 0, 1, 0]))
    assert not nested(classes, np.zeros(4, np.int64))
    groups = {"modality": modalities, "class": classes, "client": np.array([0, 0, 1, 1])}
    assert [note.split()[0] for note in notes(groups, shared_network=False)] == ["t-SNE", "Every", "Each"]
    assert [note.split()[0] for note in notes(groups, shared_network=True)] == ["t-SNE", "Every"]
    assert len(notes(groups | {"modality": np.zeros(4, np.int64)}, shared_network=True)) == 1


# ---- FM²'s parts


def test_representations_are_what_stands_before_the_classifiers() -> None:
    """y is the classifiers' weighted sum of the two halves; a part that counts 0 has none."""
    method, client = FM2(gamma_d=0.25, gamma_c=0.75), loaded(Trial(FM2(gamma_d=0.25, gamma_c=0.75), WHOLE), "large")
    client.model.eval()
    inputs, client.shown = client.inputs.batch(torch.arange(5), None), client.modality[:5]
    with torch.no_grad():
        found, y = method.representations(client, inputs), method.predict(client, inputs)
        pair = mixtures(client.model)
        domain, by_class = found["mixtures"].split(pair.domain.classifier.in_features, 1)
        torch.testing.assert_close(domain, 0.25 * found["domain"])
        bias = 0.75 * pair.by_class.classifier.bias
        logits = 0.25 * pair.domain.classify(found["domain"]) + by_class @ pair.by_class.classifier.weight.T + bias
        torch.testing.assert_close(logits, y)
        torch.testing.assert_close(pair(found["features"], client.shown), y)


def test_without_m_d_there_is_nothing_of_it_to_show() -> None:
    method, client = FM2(gamma_d=0.0, gamma_c=1.0), loaded(Trial(FM2(gamma_d=0.0, gamma_c=1.0), WHOLE), "large")
    found = method.representations(client, client.inputs.batch(torch.arange(5), None))
    assert {name: tuple(t.shape) for name, t in found.items()} == {"features": (5, 64), "mixtures": (5, 105)}


def test_alignment_never_reaches_the_backbone() -> None:
    """V is trained without M_d: with and without alignment it is the same to the bit, and the experts are not."""
    one, other = (Trial(FM2(**{"lambda": strength}), WHOLE, lr=0.1).run(3).loop.server.state for strength in (0.0, 1.0))
    inside = [name for name in one if name.startswith(DOMAIN)]
    assert all(torch.equal(one[name], other[name]) for name in one if name not in inside)
    assert any(not torch.equal(one[name], other[name]) for name in inside)


def test_the_backbone_is_fedpers() -> None:
    """Nothing of the mixtures comes back to V: without them the rounds are those of a shared base with local heads."""
    theirs, ours = (Trial(method, WHOLE, lr=0.1).run(3).loop.server.state for method in (FedPer(), FM2()))
    assert theirs.keys() == {name for name in ours if not name.startswith(DOMAIN)}
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


def test_other_methods_show_their_features() -> None:
    client = loaded(Trial(FedAvg(), NETWORKS["bn-cnn"]), "small")
    inputs = client.inputs.batch(torch.arange(4), None)
    found = FedAvg().representations(client, inputs)
    assert list(found) == ["features"]
    assert torch.equal(client.model.classify(found["features"]), client.model(inputs))


# ---- finished runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """FM² with and without alignment, on three clients of one modality each."""
    root = tmp_path_factory.mktemp("runs")
    folders = root / "whole", root / "without"
    for folder, strength in zip(folders, (0.1, 0.0), strict=True):
        file = tiny_file(root, **MIXED, method__lambda=strength)
        result = wardround("run", file, "--out", folder)
        assert result.exit_code == 0, result.output
    return folders


@pytest.fixture(scope="module")
def drawn(runs: tuple[Path, Path]) -> Path:
    out = runs[0].parent / "drawn"
    result = wardround("embed", *runs, "--out", out, "--perplexity", 5)
    assert result.exit_code == 0, result.output
    assert "written:" in result.output
    return out


def test_every_run_and_representation_has_a_map(drawn: Path) -> None:
    record = json.loads((drawn / "embedding.json").read_text())
    assert [(one["label"], one["representation"]) for one in record["maps"]] == [
        (label, name)
        for label in ("fm2 (whole)", "fm2 (without)")
        for name in ("features", "mixtures", "domain")
    ]  # fmt: skip
    assert record["images"] == 18  # three clients with six
    assert record["groups"]["client"]["of"] == [0] * 6 + [1] * 6 + [2] * 6
    assert record["groups"]["modality"]["of"] == record["groups"]["client"]["of"]
    assert len(record["groups"]["modality"]["names"]) == 3
    for one in record["maps"]:
        assert np.isfinite(one["points"]).all()
        assert np.shape(one["points"]) == (18, 2)
        assert one["figures"]["modality"]["by_chance"] == pytest.approx(3 * 6 * 5 / (18 * 17))
    assert "Every class here is of one modality" in " ".join(record["notes"])


def test_the_page_has_figures_and_pictures(drawn: Path) -> None:
    page = (drawn / "embedding.md").read_text()
    record = json.loads((drawn / "embedding.json").read_text())
    table = rows(page, "How far groups lie apart in the backbone's pooled features.")
    shown = record["maps"][0]["figures"]["modality"]
    row = table["fm2 (whole), by modality"]
    assert row["silhouette"] == f"{shown['silhouette']:.3f}".replace("-", "−")
    assert row["same neighbours, %"] == f"{100 * shown['same_neighbours']:.1f}"
    for name in ("features", "mixtures", "domain"):
        assert f"](embedding-{name}.png)" in page
        with Image.open(drawn / f"embedding-{name}.png") as picture:
            colours = {colour for _, colour in picture.convert("RGB").getcolors(10**6)}  # type: ignore[union-attr]
        assert {tuple(bytes.fromhex(colour[1:])) for colour in SERIES[:3]} <= colours


def test_through_the_servers_model(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """By default it is written beside the run; fewer images are a choice of them."""
    result = wardround("embed", runs[0], "--model", "server", "--max-images", 4, "--json")
    record = json.loads(result.stdout)
    assert (record["model"], record["images"]) == ("server", 12)
    assert not any(note.startswith("Each client's") for note in record["notes"])
    assert (runs[0] / "embedding" / "embedding.md").exists()


def test_without_modalities_images_are_coloured_by_client() -> None:
    groups = {
        "modality": {"names": ["image"], "of": [0] * 4},
        "class": {"names": [str(n) for n in range(12)], "of": [0, 3, 5, 11]},
        "client": {"names": ["a", "b"], "of": [0, 0, 1, 1]},
    }
    by_client, by_class = colourings({"groups": groups})
    assert (by_client.title, by_client.names) == ("by client", {0: "a", 1: "b"})
    assert (by_class.title, list(by_class.names)) == ("by class", [0, 3, 5, 11])
    many = {"names": [str(n) for n in range(12)], "of": list(range(12))}
    (_, wide) = colourings({"groups": groups | {"class": many}})
    assert len({wide.colour(n) for n in range(12)}) == 12


def test_colours_of_pictures_are_those_of_the_page() -> None:
    style = (Path(__file__).parents[1] / "src" / "wardround" / "report" / "style.css").read_text()
    assert len(SERIES) == len(MARKERS)
    assert all(f"--s{number}: {colour};" in style for number, colour in enumerate(SERIES))


def test_what_is_wrong_is_said(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert "holds no finished run" in refused("embed", tmp_path, "--out", tmp_path / "o")
    assert "is named twice" in refused("embed", runs[0], runs[0], "--out", tmp_path / "o")
    assert "fewer than 8 test images" in refused("embed", runs[0], "--max-images", 2, "--out", tmp_path / "o")
    config = load_experiment(runs[0] / "config.toml").changed({"data.phantoms.test_per_client": 4, "seed": 9}, "other")
    config.write(tmp_path / "other.toml")
    assert wardround("run", tmp_path / "other.toml", "--out", tmp_path / "other").exit_code == 0
    said = refused("embed", runs[0], tmp_path / "other", "--out", tmp_path / "o")
    assert "its images are not those of the runs before it" in said
    assert not (tmp_path / "o").exists()
