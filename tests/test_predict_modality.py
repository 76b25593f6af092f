"""New images of a modality that somebody names: by option, in a table, for an exported model; and what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from command_fixtures import refused, wardround
from experiment_fixtures import tiny
from linear_trial import loaded
from wardround.experiment import run
from wardround.methods.fm2 import FM2, mixtures
from wardround.methods.trial import MODALITIES, Network, Trial
from wardround.using import TrainedModel, load_trained, predict

SIZE = 32
NETWORK = Network("wardround:resnet4-lib", 16, "all", head="shared", dropout=0.0)
MIXED = {"data.phantoms.family": "mixed", "data.phantoms.classes": 2, "rounds": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of FM² and of federated averaging, three sites of a modality each, and two images."""
    folder, stream = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    for name in ("fm2", "fedavg"):
        run(tiny().changed(MIXED | {"method.name": name}, name), folder / name, workers=1)
    for name in ("a.png", "b.png"):
        Image.fromarray(stream.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(folder / name)
    return folder


@pytest.fixture
def several(place: Path, tmp_path: Path) -> Path:
    """The run of FM² as if its first client had two modalities."""
    shutil.copytree(place / "fm2", tmp_path / "several")
    file = tmp_path / "several" / "federation.json"
    roster = json.loads(file.read_text())
    roster["clients"][0]["modality_counts"] = [5, 7, 0]
    file.write_text(json.dumps(roster))
    return tmp_path / "several"


def modalities(run_folder: Path) -> list[str]:
    return list(json.loads((run_folder / "federation.json").read_text())["modalities"])


def answers(*arguments: object) -> list[dict[str, Any]]:
    """What `wardround predict --json` prints."""
    done = wardround("predict", *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def by_expert(trained: TrainedModel, file: Path, number: int | None) -> np.ndarray:
    """y from the experts themselves: M_d's number `number`, or the mean of all, and M_c, half each."""
    pixels = torch.from_numpy(np.asarray(Image.open(file))[None].copy())
    pair = mixtures(trained.model)
    with torch.no_grad():
        v = trained.model.features(trained.model.prefix(trained.model.prepare(pixels)))
        outputs = torch.stack([expert(v) for expert in pair.domain.experts])
        chosen = outputs.mean(0) if number is None else outputs[number]
        return (0.5 * pair.domain.classifier(chosen) + 0.5 * pair.by_class(v))[0].numpy()


def test_each_named_modality_goes_through_its_own_expert(place: Path) -> None:
    trained, image = load_trained(place / "fm2", "site-01"), place / "a.png"
    found = []
    for number, name in enumerate(modalities(place / "fm2")):
        (entry,) = answers(place / "fm2", image, "--client", "site-01", "--modality", name)
        assert entry["modality"] == {"name": name, "how": "as given"}
        np.testing.assert_allclose(entry["logits"], by_expert(trained, image, number), rtol=1e-4, atol=1e-4)
        found.append(entry["logits"])
    assert np.ptp(found, axis=0).max() > 0.01, "experts should differ, or this test shows nothing"


def test_without_a_name_the_clients_only_modality_is_taken_and_said(place: Path) -> None:
    first = modalities(place / "fm2")[0]
    (entry,) = answers(place / "fm2", place / "a.png", "--client", "site-01")
    assert entry["modality"] == {"name": first, "how": "the client's only one"}
    (named,) = answers(place / "fm2", place / "a.png", "--client", "site-01", "--modality", first)
    assert named["logits"] == entry["logits"]
    said = wardround("predict", place / "fm2", place / "a.png", "--client", "site-01").stdout
    assert said.endswith(f"  ({first}, the client's only one)\n")


def test_an_unknown_modality_is_said(several: Path, place: Path) -> None:
    trained, image = load_trained(several, "site-01"), place / "a.png"
    (entry,) = answers(several, image, "--client", "site-01")
    assert entry["modality"] == {"name": None, "how": "all experts alike"}
    np.testing.assert_allclose(entry["logits"], by_expert(trained, image, None), rtol=1e-4, atol=1e-4)
    said = wardround("predict", several, image, "--client", "site-01").stdout
    assert said.endswith("  (modality unknown: all experts alike)\n")


def test_a_table_says_it_row_by_row(several: Path, place: Path) -> None:
    """Known and unknown in one table, in its order; the option is for rows that say nothing."""
    names = modalities(several)
    table = place / "new.csv"
    table.write_text(f"image,modality\na.png,{names[2]}\nb.png,\na.png,{names[1]}\n")
    found = answers(several, table, place / "b.png", "--client", "site-01")
    assert [entry["image"] for entry in found] == [str(place / name) for name in ("a.png", "b.png", "a.png", "b.png")]
    assert [entry["modality"]["name"] for entry in found] == [names[2], None, names[1], None]
    trained = load_trained(several, "site-01")
    for entry, (name, number) in zip(
        found, (("a.png", 2), ("b.png", None), ("a.png", 1), ("b.png", None)), strict=True
    ):
        np.testing.assert_allclose(entry["logits"], by_expert(trained, place / name, number), rtol=1e-4, atol=1e-4)
    filled = answers(several, table, "--client", "site-01", "--modality", names[0])
    assert [entry["modality"]["name"] for entry in filled] == [names[2], names[0], names[1]]


def test_an_exported_model_knows_its_modalities(place: Path, several: Path, tmp_path: Path) -> None:
    file, image = tmp_path / "model.safetensors", place / "a.png"
    assert wardround("export", several, "--client", "site-01", "--to", file).exit_code == 0
    for extra in ([], ["--modality", modalities(several)[1]]):
        assert answers(file, image, *extra) == answers(several, image, "--client", "site-01", *extra)
    assert "it has " + ", ".join(modalities(several)) in refused("predict", file, image, "--modality", "ultrasound")


def test_wrong_names_get_the_vocabulary(place: Path, tmp_path: Path) -> None:
    folder, image, known = place / "fm2", place / "a.png", ", ".join(modalities(place / "fm2"))
    said = refused("predict", folder, image, "--client", "site-01", "--modality", "ultrasound")
    assert said == f"wardround: --modality ultrasound: the model knows no such modality (it has {known})"
    table = tmp_path / "new.csv"
    table.write_text(f"image,modality\n{image},fundus\n")
    assert refused("predict", folder, table, "--client", "site-01", "--modality", "ultrasound") == said
    table.write_text(f"image,modality\n{image},\n{image},ultrasound\n")
    said = refused("predict", folder, table, "--client", "site-01")
    assert said == f"wardround: {table}: row 3, modality ultrasound: the model knows no such modality (it has {known})"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("file,modality\na.png,x\n", "missing columns: image; found: file, modality"),
        ("image,modality\n", "names no image; it has a header alone"),
        ("image,modality\n,x\n", "row 2 has no image; its column 'image' is empty"),
        ("image,modality\na.png\n", "the header has 2 cells, but row 2 has 1"),
        ("image\nabsent.png\n", "absent.png: no such file"),
    ],
)
def test_a_wrong_table_is_explained(place: Path, tmp_path: Path, text: str, reason: str) -> None:
    table = tmp_path / "new.csv"
    table.write_text(text)
    assert refused("predict", place / "fm2", table, "--client", "site-01").endswith(reason)


def test_a_method_that_asks_for_no_modality_says_so(place: Path, tmp_path: Path) -> None:
    """A table may have the column all the same."""
    said = refused("predict", place / "fedavg", place / "a.png", "--client", "site-01", "--modality", "x")
    assert said.endswith("(fedavg) predicts does not depend on the modality; leave the option out")
    table = tmp_path / "new.csv"
    table.write_text(f"image,modality\n{place / 'a.png'},whatever\n")
    (entry,) = answers(place / "fedavg", table, "--client", "site-01")
    assert "modality" not in entry
    assert [entry] == predict(load_trained(place / "fedavg", "site-01"), [place / "a.png"])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (FM2(), "all experts alike"),
        (FM2(routing="prior"), "experts by the gate alone"),
        (FM2(routing="prior", prior=0.0), ""),
        (FM2(routing="soft"), ""),
        (FM2(gamma_d=0.0, gamma_c=1.0), ""),
    ],
)
def test_fm2_says_what_it_does_exactly_where_the_modality_matters(method: FM2, said: str) -> None:
    client = loaded(Trial(method, NETWORK, ("large", "small")), "large")
    assert method.without_modality(client.model) == said
    inputs, found = client.inputs.batch(torch.arange(4), None), []
    for number in range(len(MODALITIES)):
        client.shown = torch.full((4,), number)
        with torch.no_grad():
            found.append(method.predict(client, inputs).numpy())
    assert (np.ptp(found, axis=0).max() > 0) == bool(said)


def test_fm2_says_that_it_looks_for_the_nearest_mean_once_it_has_some() -> None:
    method = FM2(unknown_modality="clusters")
    client = loaded(Trial(method, NETWORK, ("large", "small")), "large")
    assert method.without_modality(client.model) == "all experts alike"
    method.subset(client)
    assert method.without_modality(client.model) == "taken for the one of the nearest mean feature"
