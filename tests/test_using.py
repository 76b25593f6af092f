"""A trained model put to use: the same logits from the run's folder, from an exported file and from a plain script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from experiment_fixtures import TINY, in_a_process
from wardround.config import Experiment, experiment_from
from wardround.errors import InputError
from wardround.evaluation.predictions import read_predictions
from wardround.experiment import run
from wardround.federation.observers import Observer
from wardround.using import export, load_exported, load_trained, predict

SIZE = 32
SITES, CLASSES = ("north", "south"), ("dark", "light")
SYSTEMS: dict[str, dict[str, Any]] = {
    "fedavg": {"method.name": "fedavg", "model.head": "shared"},
    "posthoc": {"method.name": "pafp", "model.logit_corrector": "posthoc"},
    "affine": {"method.name": "pafp-alt", "model.logit_corrector": "affine"},
    "isolated": {"method.name": "isolated"},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders site/class/image of small pictures; south has three times as many dark ones as light ones."""
    root, stream = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for site in SITES:
        for label, (name, level) in enumerate(zip(CLASSES, (70, 150), strict=True)):
            folder = root / site / name
            folder.mkdir(parents=True)
            for number in range(4 if site == "south" and label else 12):
                pixels = np.clip(level + 40 * stream.standard_normal((SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{site}-{name}-{number}.png")
    return root


def experiment(images: Path, **changes: Any) -> Experiment:
    """Three rounds on the pictures; without the cache the stored predictions come from the images themselves."""
    data = {"source": "folders", "path": str(images), "image_size": SIZE, "test_fraction": 0.3}
    base = TINY | {"data": data, "rounds": 3, "training": TINY["training"] | {"cache": False, "lr": 0.05}}
    return experiment_from(base, "pictures").changed(changes, "pictures")


@pytest.fixture(scope="module")
def runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run of each system."""
    root = tmp_path_factory.mktemp("runs")
    for name, changes in SYSTEMS.items():
        run(experiment(images, **changes), root / name)
    return {name: root / name for name in SYSTEMS}


def stored(folder: Path, client: str, which: str = "personal") -> tuple[list[str], np.ndarray]:
    """Names and logits of the run's own predictions, in the order of the names."""
    with np.load(folder / "predictions" / f"{client}.npz") as file:
        names = [str(name) for name in file["names"]]
    return sorted(names), read_predictions(folder, which)[client][1]


def logits(found: list[dict[str, Any]]) -> np.ndarray:
    """What `predict` found, as an array."""
    return np.array([entry["logits"] for entry in found], np.float32)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("client", SITES)
def test_predictions_from_the_folder_are_the_runs_own(
    system: str, client: str, images: Path, runs: dict[str, Path]
) -> None:
    names, expected = stored(runs[system], client)
    found = predict(load_trained(runs[system], client), [images / name for name in names])
    np.testing.assert_allclose(logits(found), expected, rtol=1e-5, atol=1e-5)
    for entry, row in zip(found, expected, strict=True):
        assert entry["label"] == CLASSES[int(row.argmax())]
        odds = np.exp(row - row.max())
        np.testing.assert_allclose(list(entry["probabilities"].values()), odds / odds.sum(), rtol=1e-4)


@pytest.mark.parametrize("system", ["fedavg", "posthoc", "affine"])
def test_the_servers_model_is_the_one_that_was_received(system: str, images: Path, runs: dict[str, Path]) -> None:
    names, expected = stored(runs[system], "south", "received")
    found = predict(load_trained(runs[system], "south", "server"), [images / name for name in names])
    np.testing.assert_allclose(logits(found), expected, rtol=1e-5, atol=1e-5)
    personal = stored(runs[system], "south")[1]
    assert np.abs(personal - expected).max() > 1e-3, "the two models should differ, or this test shows nothing"


def test_the_cache_costs_no_more_than_half_precision(images: Path, tmp_path: Path) -> None:
    run(experiment(images, **{"method.name": "pafp", "training.cache": True}), tmp_path / "run")
    names, expected = stored(tmp_path / "run", "north")
    found = predict(load_trained(tmp_path / "run", "north"), [images / name for name in names])
    np.testing.assert_allclose(logits(found), expected, atol=0.02)


SCRIPT = """
import json, sys
import numpy as np, torch
from PIL import Image
from safetensors import safe_open
from wardround.models.classifier import build_classifier
from wardround.models.feature_alignment import insert_alignment
from wardround.models.options import ModelOptions

image, *files = sys.argv[1:]
pixels = torch.from_numpy(np.asarray(Image.open(image))[None].copy())
for file in files:
    with safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["wardround"])
        state = {name: opened.get_tensor(name) for name in opened.keys()}
    data, method = about["experiment"]["data"], about["experiment"]["method"]
    options = ModelOptions(**about["experiment"]["model"])
    model = build_classifier(options, len(about["classes"]), data["channels"], data["image_size"], seed=0)
    if method["name"].startswith("pafp"):
        insert_alignment(model, data["image_size"], groups=method["groups"], variant=method["variant"])
    model.load_state_dict(state)
    if options.logit_corrector != "none":
        model.corrector.set_counts(about["counts"])
    with torch.no_grad():
        print(json.dumps(model.eval().logits_of_images(pixels)[0].tolist()))
assert not {"wardround.experiment", "wardround.methods", "wardround.federation"} & set(sys.modules)
"""


def test_an_exported_model_gives_the_same_logits_in_a_plain_script(
    images: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    name = stored(runs["fedavg"], "south")[0][0]
    expected, files = [], []
    for system, which in [(system, "personal") for system in SYSTEMS] + [("affine", "server")]:
        trained = load_trained(runs[system], "south", which)  # type: ignore[arg-type]
        files.append(tmp_path / f"{system}-{which}.safetensors")
        export(trained, files[-1])
        expected.append(predict(trained, [images / name])[0]["logits"])
        again = predict(load_exported(files[-1]), [images / name])[0]["logits"]
        np.testing.assert_array_equal(again, expected[-1])
    command = [sys.executable, "-c", SCRIPT, images / name, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_exported_file_says_what_it_is_but_not_where_the_images_were(
    images: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "er" / "model.safetensors"
    export(load_trained(runs["posthoc"], "south"), file)
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata()["wardround"]
    about = json.loads(text)
    assert (about["client"], about["classes"]) == ("south", list(CLASSES))
    roster = json.loads((runs["posthoc"] / "federation.json").read_text())
    assert about["counts"] == roster["clients"][1]["counts"]["train"]
    assert str(images.parent) not in text
    assert load_exported(file).counts == tuple(about["counts"])


# ---- what goes wrong


def test_an_unknown_client_is_suggested_the_nearest(runs: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"--client nort: .* has no such client \(did you mean 'north'\?\)"):
        load_trained(runs["fedavg"], "nort")
    with pytest.raises(InputError, match=r"--client is missing; .* has north, south"):
        load_trained(runs["fedavg"], None)


def test_an_image_that_cannot_be_read_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    trained = load_trained(runs["fedavg"], "north")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    for name, reason in (("absent.png", "no such file"), ("broken.png", "not a readable image")):
        with pytest.raises(InputError, match=f"{name}: {reason}"):
            predict(trained, [tmp_path / name])


def test_a_folder_without_a_run_is_named(tmp_path: Path, runs: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="holds no run"):
        load_trained(tmp_path, "north")
    shutil.copytree(runs["fedavg"], tmp_path / "fedavg" / "seed-3")
    with pytest.raises(InputError, match=r"it is a comparison: take one of its runs, such as .*fedavg/seed-3"):
        load_trained(tmp_path, "north")


def test_isolated_training_has_no_servers_model(runs: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="--model server: nothing was shared"):
        load_trained(runs["isolated"], "north", "server")


class _Stop(Observer):
    def checkpointed(self, round: int) -> None:
        if round == 2:
            os._exit(0)


def test_an_unfinished_run_has_a_servers_model_only(images: Path, tmp_path: Path) -> None:
    assert in_a_process(lambda: run(experiment(images), tmp_path / "run", observers=[_Stop()])) == 0
    with pytest.raises(InputError, match=r"stopped after round 2 of 3.* --resume, or take --model server"):
        load_trained(tmp_path / "run", "north")
    assert load_trained(tmp_path / "run", "north", "server").client == "north"


def test_a_client_that_sat_out_the_last_round_has_no_personal_model(images: Path, tmp_path: Path) -> None:
    half = {"federation.participation": 0.5, "method.name": "pafp"}
    run(experiment(images, **half), tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(line["client"] for line in log if line["round"] == 3 and line.get("log"))
    (absent,) = set(SITES) - {last}
    assert load_trained(tmp_path / "run", last).client == last
    with pytest.raises(InputError, match=f"--client {absent}: took no part in the last round"):
        load_trained(tmp_path / "run", absent)
    assert load_trained(tmp_path / "run", absent, "server").client == absent


def test_damaged_and_foreign_files_are_no_exported_models(runs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    export(load_trained(runs["fedavg"], "north"), file)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-10])
    checkpoint = runs["fedavg"] / "checkpoints" / "round-0003" / "server.safetensors"
    for wrong in (cut, checkpoint, tmp_path / "absent.safetensors"):
        with pytest.raises(InputError, match="not a model that `wardround export` wrote"):
            load_exported(wrong)


def test_an_export_that_cannot_be_written_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export(load_trained(runs["fedavg"], "north"), tmp_path / "file" / "model.safetensors")


def test_runs_of_an_older_version_can_still_be_used(images: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    """Their rosters say nothing of modalities."""
    old = tmp_path / "old"
    shutil.copytree(runs["fedavg"], old)
    roster = json.loads((old / "federation.json").read_text())
    del roster["modalities"]
    for client in roster["clients"]:
        del client["modality_counts"]
    (old / "federation.json").write_text(json.dumps(roster))
    files = sorted((images / "north" / "dark").iterdir())[:2]
    ours, theirs = (predict(load_trained(folder, "north"), files) for folder in (old, runs["fedavg"]))
    assert ours == theirs
