"""The attack by hand, its control, the way of its gradient, and what a run and a comparison say of it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from command_fixtures import refused, wardround
from encoder_fixtures import written
from experiment_fixtures import TINY
from wardround import attacking
from wardround.attacking import Attack, Settings, attack_images, loss_signs, moved, noise_signs
from wardround.config import experiment_from
from wardround.data.federation import Samples, samples
from wardround.errors import InputError
from wardround.experiment import run
from wardround.methods.fedmedclip import FedMedCLIP
from wardround.models.backbones import load_backbone
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.seeds import torch_stream
from wardround.training.client import Client
from wardround.training.inputs import ImageInputs
from wardround.training.options import TrainingOptions

SIZE = 32
METHODS = ("fedavg", "fedproto", "fedco2", "fedrod")


# ---- the formulas


class Linear:
    """`logits = W x`."""

    def __init__(self, weight: list[list[float]]) -> None:
        self.weight = torch.tensor(weight)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1) @ self.weight.T


def pictures(*values: list[float]) -> Tensor:
    """One-channel images of two pixels in a column."""
    return torch.tensor(values).view(len(values), 2, 1, 1)


def test_the_step_of_a_linear_model_by_hand() -> None:
    """The gradient of the cross-entropy is W^T (p - y): for label 0 along w_1 - w_0, for label 1 against it."""
    predict = Linear([[1.0, -2.0], [3.0, -5.0]])  # w_1 - w_0 = (2, -3)
    x = pictures([0.5, 0.5], [0.5, 0.5], [0.98, 0.01])
    signs = loss_signs(predict, x, torch.tensor([0, 1, 0]))
    assert signs.flatten(1).tolist() == [[1, -1], [-1, 1], [1, -1]]
    stepped = moved(x, signs, 0.1).flatten(1)
    torch.testing.assert_close(stepped, torch.tensor([[0.6, 0.4], [0.4, 0.6], [1.0, 0.0]]))  # the last is clipped


def test_epsilon_zero_changes_nothing() -> None:
    x = torch.rand(5, 4, 4, 3)
    assert torch.equal(moved(x, torch.ones_like(x), 0.0), x)
    data = images_of(torch.rand(20, 1, 2, 1))
    predict = Linear([[1.0, -2.0], [-1.0, 1.5]])
    found = attack_images(predict, data, 1, Settings((0.0,)), torch_stream(0, "noise"), torch.device("cpu"))
    clean = found.predicted["clean", 0.0]
    assert set(clean) == {0, 1}
    for kind in ("attacked", "noise"):
        np.testing.assert_array_equal(found.predicted[kind, 0.0], clean)


def test_the_control_is_as_large_as_the_attack_and_drawn_anew_from_its_stream() -> None:
    x = torch.full((6, 4, 4, 3), 0.5)
    noise = noise_signs(x.shape, torch_stream(0, "noise"))
    assert set(noise.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(noise.mean())) < 0.2
    assert torch.equal(noise, noise_signs(x.shape, torch_stream(0, "noise")))
    signs = loss_signs(lambda p: p.flatten(1)[:, :3], x, torch.zeros(6, dtype=torch.int64))
    assert float((moved(x, noise, 8 / 255) - x).abs().max()) == float((moved(x, signs, 8 / 255) - x).abs().max())


def test_where_there_is_no_gradient_a_pixel_stays() -> None:
    def broken(pixels: Tensor) -> Tensor:
        first = pixels.flatten(1)[:, :1]
        return torch.cat([first, (first - first).sqrt()], 1)  # the root's slope at 0 is infinite

    x = torch.rand(3, 1, 2, 1)
    assert torch.equal(loss_signs(broken, x, torch.zeros(3, dtype=torch.int64)), torch.zeros_like(x))
    data = images_of(torch.rand(3, 1, 2, 1))
    flat = Linear([[0.0, 0.0], [0.0, 0.0]])
    settings = Settings((8.0,))
    assert attack_images(flat, data, 1, settings, torch_stream(0, ""), torch.device("cpu")).without_gradient == 3
    steep = Linear([[1.0, 0.0], [0.0, 1.0]])
    assert attack_images(steep, data, 1, settings, torch_stream(0, ""), torch.device("cpu")).without_gradient == 0


def test_levels_are_sorted_and_held_to_their_range() -> None:
    assert Settings((4.0, 1.0, 4.0)).epsilons == (1.0, 4.0)
    for wrong in ((-1.0,), (256.0,), (float("nan"),), ()):
        with pytest.raises(InputError, match="expected levels from 0 to 255"):
            Settings(wrong)


def images_of(pixels: Tensor) -> Samples:
    """Pixels in 0..1 `(N, 1, 2, 1)` as square images of one pixel with two channels, of alternating classes."""
    array = (255 * pixels).round().to(torch.uint8).view(len(pixels), 1, 1, 2).numpy()
    return samples(array, np.arange(len(array)) % 2, [str(i) for i in range(len(array))])


# ---- the gradient's way


def test_pixels_become_what_their_images_become() -> None:
    normalise = load_backbone("wardround:resnet4-lib", pretrained=False, seed=0).normalise
    images = torch.randint(0, 256, (2, 5, 5, 3), dtype=torch.uint8)
    torch.testing.assert_close(normalise.of_pixels(images.float() / 255), normalise(images))
    with pytest.raises(TypeError, match="floating-point"):
        normalise.of_pixels(images)
    with pytest.raises(InputError, match="images have 2 channels"):
        normalise.of_pixels(torch.zeros(1, 5, 5, 2))


@pytest.fixture
def encoder(tmp_path: Path) -> Classifier:
    """FedMedCLIP on a CLIP with few and narrow layers."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    options = ModelOptions(backbone=written(tmp_path), pretrained=False, finetune_blocks=0, dropout=0.0)
    model = build_classifier(options, ("naevus", "melanoma"), 3, SIZE, seed=0)
    FedMedCLIP(hidden=16).edit(model, SIZE)
    return model.eval()


def test_the_gradient_passes_the_frozen_encoder_and_the_ensemble(encoder: Classifier) -> None:
    method = FedMedCLIP(hidden=16)
    nothing = samples(np.zeros((0, SIZE, SIZE, 3), np.uint8), [], [])
    client = Client(
        name="a", round=1, seed=0, model=encoder, rules=method.rules(encoder),
        inputs=ImageInputs(encoder, nothing, SIZE, "none", torch.device("cpu")), labels=torch.zeros(0),
        modality=torch.zeros(0), counts=torch.ones(2), options=TrainingOptions(),
    )  # fmt: skip

    def predict(pixels: Tensor) -> Tensor:
        return method.predict(client, encoder.inputs_of_pixels(pixels))

    def losses(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.cross_entropy(predict(pixels), labels, reduction="none")

    images = torch.randint(0, 256, (8, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels, labels = images.float() / 255, torch.arange(8) % 2
    before = copy.deepcopy(encoder.state_dict())
    with torch.no_grad():
        usual = method.predict(client, encoder.prefix(encoder.prepare(images)))
        torch.testing.assert_close(predict(pixels), usual, rtol=1e-4, atol=1e-5)
    signs = loss_signs(predict, pixels, labels)
    assert float((signs != 0).float().mean()) > 0.99
    assert (losses(moved(pixels, signs, 1 / 255)) > losses(pixels)).all()
    assert (losses(moved(pixels, -signs, 1 / 255)) < losses(pixels)).all()
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


# ---- runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and light pictures of two sites, an experiment on them, and a comparison of it with a run of each seed."""
    root = tmp_path_factory.mktemp("place")
    stream = np.random.default_rng(0)
    for site in ("north", "south"):
        for name, level in (("dark", 90), ("light", 150)):
            folder = root / "images" / site / name
            folder.mkdir(parents=True)
            for number in range(12):
                pixels = np.clip(level + 40 * stream.standard_normal((SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    data = {"source": "folders", "path": str(root / "images"), "image_size": SIZE, "test_fraction": 0.4}
    training = TINY["training"] | {"cache_type": "float32", "lr": 0.05, "loss": "cross-entropy"}
    experiment = experiment_from(TINY | {"data": data, "rounds": 3, "training": training}, "pictures")
    experiment.write(root / "pictures.toml")
    for method in METHODS:
        for seed in (3, 4) if method in ("fedavg", "fedproto") else (3,):
            changes = {"method.name": method, "seed": seed, "model.head": "shared"}
            run(experiment.changed(changes, "pictures"), root / "compared" / method / f"seed-{seed}")
    return root


def scores(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("method", METHODS)
def test_clean_scores_are_the_runs_own(place: Path, method: str) -> None:
    """Whatever a method predicts by: its network, prototypes in its memory, two models, two heads."""
    folder = place / "compared" / method / "seed-3"
    found = Attack(Settings((64.0,))).run(folder, place / f"{method}.json")
    stored = scores(folder / "results.json")["clients"]
    assert found["clients"].keys() == stored.keys()
    for name, entry in found["clients"].items():
        assert entry["n"] == stored[name]["n_test"]
        for figure in ("accuracy", "balanced_accuracy"):
            assert entry["clean"][figure] == pytest.approx(stored[name][figure][0])
    pooled = scores(folder / "results.json")["summary"]["pooled_balanced_accuracy"]["mean"]
    assert found["summary"]["clean"]["pooled_balanced_accuracy"] == pytest.approx(pooled)
    assert found["summary"]["attacked"]["64"]["accuracy"] <= found["summary"]["clean"]["accuracy"]


def test_a_hard_attack_hurts_a_model_that_noise_does_not(place: Path) -> None:
    found = Attack(Settings((1.0, 64.0))).run(place / "compared" / "fedavg" / "seed-3", place / "hard.json")["summary"]
    assert found["clean"]["accuracy"] > 0.9
    assert found["attacked"]["64"]["accuracy"] < 0.2
    assert found["noise"]["1"]["accuracy"] > 0.9
    assert found["attacked"]["64"]["accuracy"] < found["noise"]["64"]["accuracy"]
    assert found["without_gradient"] == 0


def test_a_finished_attack_is_kept_and_another_is_not_taken_for_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = place / "compared" / "fedavg" / "seed-3", tmp_path / "attack.json"
    first = Attack(Settings((8.0,), max_images=4)).run(folder, file)
    assert [entry["n"] for entry in first["clients"].values()] == [4, 4]
    written = file.read_bytes()
    asked = []
    monkeypatch.setattr(attacking, "load_trained", lambda *what: asked.append(what) or pytest.fail("computed anew"))
    assert Attack(Settings((8.0,), max_images=4)).run(folder, file) == first
    assert file.read_bytes() == written
    for other in (Settings((8.0,)), Settings((4.0,), max_images=4), Settings((8.0,), ("north",), 4)):
        with pytest.raises(pytest.fail.Exception, match="computed anew"):
            Attack(other).run(folder, file)
    with pytest.raises(pytest.fail.Exception, match="computed anew"):  # nor is that of another run
        Attack(Settings((8.0,), max_images=4)).run(place / "compared" / "fedavg" / "seed-4", file)
    assert asked[-1][0] == place / "compared" / "fedavg" / "seed-4"


def test_a_file_that_is_no_attack_is_written_anew(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "attack.json"
    file.write_text('{"attack": "fg')
    Attack(Settings((8.0,), ("north",), 2)).run(place / "compared" / "fedavg" / "seed-3", file)
    assert list(scores(file)["clients"]) == ["north"]


def test_a_comparison_has_the_mean_over_seeds_and_a_page(place: Path) -> None:
    folder = place / "compared"
    result = wardround("attack", folder, "--epsilon", "8,2", "--max-images", 6)
    assert result.exit_code == 0, result.output
    record = scores(folder / "attack.json")
    assert record["settings"]["epsilons"] == [2.0, 8.0]
    assert record["systems"]["fedproto"]["seeds"] == [3, 4]
    each = [scores(folder / "fedproto" / f"seed-{seed}" / "attack.json")["summary"] for seed in (3, 4)]
    for kind in ("attacked", "noise"):
        values = [one[kind]["8"]["balanced_accuracy"] for one in each]
        mean = record["systems"]["fedproto"][kind]["8"]["balanced_accuracy"]["mean"]
        assert mean == pytest.approx(sum(values) / 2)
    page = (folder / "attack.md").read_text()
    assert "wardround" in page
    heads = re.findall(r"^\| method \|.*$", page, re.M)
    assert heads == ["| method | clean | FGSM 2/255 | FGSM 8/255 | noise 2/255 | noise 8/255 |"] * 3
    for figure in ("accuracy", "balanced_accuracy", "pooled_balanced_accuracy"):
        mean = record["systems"]["fedrod"]["attacked"]["8"][figure]["mean"]
        assert re.search(rf"^\| fedrod \|.* {100 * mean:.1f} \|", page.replace("*", ""), re.M)


def test_a_run_gets_its_file_and_the_servers_model_can_be_asked(place: Path, tmp_path: Path) -> None:
    run_folder = place / "compared" / "fedrod" / "seed-3"
    out = tmp_path / "server.json"
    result = wardround("attack", run_folder, "--epsilon", 16, "--model", "server", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == scores(out)
    stored = scores(run_folder / "results.json")["global"]["clients"]
    for name, entry in scores(out)["clients"].items():
        assert entry["clean"]["accuracy"] == pytest.approx(stored[name]["accuracy"][0])
    assert not (tmp_path / "server.md").exists()


def test_what_is_wrong_is_said(place: Path, tmp_path: Path) -> None:
    run_folder = place / "compared" / "fedavg" / "seed-3"
    assert "holds no finished run" in refused("attack", tmp_path)
    assert "holds no finished run" in refused("attack", tmp_path / "absent")
    for typed, shown in (("-1", "-1"), ("1,300", "300"), ("1,much", "much"), (",", "is empty")):
        said = refused("attack", run_folder, f"--epsilon={typed}")
        assert said == f"wardround: --epsilon {shown}: expected levels from 0 to 255, as 1,2,4,8"
    said = refused("attack", run_folder, "--clients", "nort", "--out", tmp_path / "no.json")
    assert re.search(r"--clients nort: .* has no such client \(did you mean 'north'\?\)", said)
    assert not (tmp_path / "no.json").exists()


def test_other_images_than_the_runs_are_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "images", tmp_path / "images")
    shutil.copytree(place / "compared" / "fedavg" / "seed-3", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(place / "images"), str(tmp_path / "images")))
    for file in list((tmp_path / "images" / "south" / "dark").iterdir())[:6]:
        file.unlink()
    with pytest.raises(InputError, match="began with other images"):
        Attack(Settings((8.0,))).run(tmp_path / "run")
