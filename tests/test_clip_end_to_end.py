"""Every method of the CLIP family, from an experiment to an exported model, on a tiny random open_clip."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_fixtures import saved_weights, written
from experiment_fixtures import tiny
from wardround.config import Experiment
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.experiment import run
from wardround.systems import systems_named
from wardround.using import export, load_exported, load_trained

METHODS = (
    *("clip-zeroshot", "fedclip", "facmic", "lp++", "promptfl", "cocoop", "fedapt:domains=3:length=8", "fedmedclip"),
    *("fedlora:model.finetune_blocks=all", "fedavg-clip", "fedprox-clip", "moon-clip"),
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Two sites that train and one that does not, on an encoder whose weights lie in a file."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    folder = tmp_path_factory.mktemp("encoder")
    return tiny(
        model__backbone=written(folder),
        model__pretrained=saved_weights(folder),
        model__finetune_blocks=0,
        model__dropout=0.0,
        data__held_out=["site-03"],
        training__loss="cross-entropy",
        training__cache_type="float32",
        rounds=1,
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_runs_predicts_and_is_exported(experiment: Experiment, tmp_path: Path, name: str) -> None:
    (system,) = systems_named(experiment, [name])
    results: dict[str, Any] = run(system.experiment, tmp_path / "run", workers=1)
    assert set(results["clients"]) == {"site-01", "site-02"}
    assert results["held_out"]["site-03"]["n_test"] == 21, "what is shared predicts alone"
    trained = load_trained(tmp_path / "run", "site-01")
    images = read_federation(system.experiment.data, system.experiment.seed).client("site-01").test.images
    logits = trained.logits(images)
    assert np.isfinite(logits).all()
    export(trained, tmp_path / "model.safetensors")
    if trained.method.predicts_with_text:
        with pytest.raises(InputError, match=r"put 'weights\.safetensors' beside it"):
            load_exported(tmp_path / "model.safetensors")
        shutil.copy(system.experiment.model.pretrained, tmp_path)  # type: ignore[arg-type]
    np.testing.assert_array_equal(load_exported(tmp_path / "model.safetensors").logits(images), logits)
