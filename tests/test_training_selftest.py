"""The self-test picks what is faster, remembers it, and leaves the model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wardround.methods.base import FedAvg
from wardround.methods.trial import Network
from wardround.models.classifier import Classifier
from wardround.training import selftest
from wardround.training.options import TrainingOptions
from wardround.training.selftest import CHOICES, choose_arithmetic

CPU = torch.device("cpu")
AUTO: dict[str, Any] = {"memory_format": "auto", "depthwise": "auto", "precision": "auto", "compile": "auto"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Seconds a step by setting, 1.0 unless a test says otherwise, and every measurement in order."""
    book: dict[str, Any] = {"seconds": {}, "measured": []}

    def seconds(model: Classifier, options: TrainingOptions, *_: Any) -> float:
        book["measured"].append(tuple(getattr(options, key) for key in CHOICES))
        time = 1.0
        for key in CHOICES:
            time *= book["seconds"].get(getattr(options, key), 1.0)
        return time

    monkeypatch.setattr(selftest, "seconds_a_step", seconds)
    return book


def mobile() -> Classifier:
    """A network with large depthwise kernels."""
    return Network("torchvision:efficientnet_b0", 32, 2).model(FedAvg())


def plain() -> Classifier:
    return Network("wardround:cnn-bn", 20, 2).model(FedAvg())


def chosen(options: TrainingOptions) -> tuple[str, ...]:
    return tuple(getattr(options, key) for key in CHOICES)


def test_the_faster_setting_is_picked(clock: dict[str, Any]) -> None:
    clock["seconds"] = {"channels_last": 0.5, "shifts": 0.7, "pointwise-bfloat16": 0.9, "bfloat16": 2.0, "on": 0.8}
    found = choose_arithmetic(mobile(), TrainingOptions(**AUTO), 32, CPU, None)
    assert chosen(found) == ("channels_last", "shifts", "pointwise-bfloat16", "on")


def test_a_setting_must_be_clearly_faster(clock: dict[str, Any]) -> None:
    clock["seconds"] = {"channels_last": 0.96, "shifts": 0.97, "pointwise-bfloat16": 0.96, "bfloat16": 1.5, "on": 1.03}
    found = choose_arithmetic(mobile(), TrainingOptions(**AUTO), 32, CPU, None)
    assert chosen(found) == ("contiguous", "library", "float32", "off")


def test_settings_are_tried_on_top_of_those_chosen_before(clock: dict[str, Any]) -> None:
    clock["seconds"] = {"channels_last": 0.5}
    choose_arithmetic(mobile(), TrainingOptions(memory_format="auto", depthwise="auto"), 32, CPU, None)
    assert clock["measured"] == [
        ("contiguous", "library", "float32", "off"),
        ("channels_last", "library", "float32", "off"),
        ("channels_last", "library", "float32", "off"),
        ("channels_last", "shifts", "float32", "off"),
    ]


def test_a_compiled_network_is_tried_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, channels_last wins; compiled, contiguous with shifts is the fastest of all."""

    def seconds(model: Classifier, options: TrainingOptions, *_: Any) -> float:
        if options.compile == "off":
            return 0.7 if options.memory_format == "channels_last" else 1.0
        return 0.5 if (options.memory_format, options.depthwise) == ("contiguous", "shifts") else 0.8

    monkeypatch.setattr(selftest, "seconds_a_step", seconds)
    found = choose_arithmetic(mobile(), TrainingOptions(**AUTO), 32, CPU, None)
    assert chosen(found) == ("contiguous", "shifts", "float32", "on")


def test_what_is_decided_is_not_measured(clock: dict[str, Any]) -> None:
    options = TrainingOptions(memory_format="channels_last", depthwise="shifts", precision="bfloat16")
    assert choose_arithmetic(mobile(), options, 32, CPU, None) == options
    assert clock["measured"] == []


def test_shifts_are_not_tried_without_large_depthwise_kernels(clock: dict[str, Any]) -> None:
    clock["seconds"] = {"shifts": 0.1}
    found = choose_arithmetic(plain(), TrainingOptions(memory_format="auto", depthwise="auto"), 20, CPU, None)
    assert found.depthwise == "library"
    assert {setting[1] for setting in clock["measured"]} == {"library"}


def test_where_no_block_trains_only_the_layout_is_tried(clock: dict[str, Any]) -> None:
    clock["seconds"] = {"channels_last": 0.5}
    frozen = Network("torchvision:efficientnet_b0", 32, 0).model(FedAvg())
    found = choose_arithmetic(frozen, TrainingOptions(**AUTO), 32, CPU, None)
    assert chosen(found) == ("channels_last", "library", "float32", "off")
    assert len(clock["measured"]) == 2


def test_frozen_blocks_are_timed_where_none_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that trains nothing at all can be timed too."""
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    frozen = Network("wardround:cnn-bn", 20, 0).model(FedAvg()).requires_grad_(False)
    assert selftest.seconds_a_step(frozen, TrainingOptions(memory_format="contiguous"), 20, CPU) > 0


def test_the_answer_is_remembered(clock: dict[str, Any], tmp_path: Path) -> None:
    clock["seconds"] = {"channels_last": 0.5}
    options = TrainingOptions(memory_format="auto", depthwise="library")
    first = choose_arithmetic(plain(), options, 20, CPU, tmp_path)
    clock["seconds"] = {"channels_last": 2.0}
    assert choose_arithmetic(plain(), options, 20, CPU, tmp_path) == first
    assert len(clock["measured"]) == 2
    (answer,) = json.loads((tmp_path / "arithmetic.json").read_text()).values()
    assert answer == {"memory_format": "channels_last"}


@pytest.mark.parametrize("change", [{"threads": 2}, {"batch_size": 7}, {"precision": "auto"}])
def test_another_question_is_measured_anew(clock: dict[str, Any], tmp_path: Path, change: dict[str, Any]) -> None:
    options = TrainingOptions(memory_format="auto", depthwise="library")
    choose_arithmetic(plain(), options, 20, CPU, tmp_path)
    before = len(clock["measured"])
    choose_arithmetic(plain(), options.model_copy(update=change), 20, CPU, tmp_path)
    choose_arithmetic(mobile(), options, 20, CPU, tmp_path)
    assert len(clock["measured"]) >= 2 * before + 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"other": {}}'])
def test_a_damaged_memory_is_measured_anew(clock: dict[str, Any], tmp_path: Path, content: str) -> None:
    (tmp_path / "arithmetic.json").write_text(content)
    options = TrainingOptions(memory_format="auto", depthwise="library")
    assert choose_arithmetic(plain(), options, 20, CPU, tmp_path).memory_format == "contiguous"
    assert len(json.loads((tmp_path / "arithmetic.json").read_text())) == 1 + content.startswith('{"other')


@pytest.mark.parametrize("answer", [{}, {"memory_format": "diagonal"}, {"lr": "7"}, "channels_last"])
def test_a_remembered_answer_that_makes_no_sense_is_measured_anew(
    clock: dict[str, Any], tmp_path: Path, answer: Any
) -> None:
    options = TrainingOptions(memory_format="auto", depthwise="library")
    choose_arithmetic(plain(), options, 20, CPU, tmp_path)
    file = tmp_path / "arithmetic.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), answer)))
    found = choose_arithmetic(plain(), options, 20, CPU, tmp_path)
    assert (found.memory_format, found.lr) == ("contiguous", options.lr)
    assert len(clock["measured"]) == 4


def test_an_unwritable_memory_costs_a_measurement_only(
    clock: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selftest, "write_atomically", full)
    options = TrainingOptions(memory_format="auto", depthwise="library")
    for _ in range(2):
        choose_arithmetic(plain(), options, 20, CPU, tmp_path)
    assert len(clock["measured"]) == 4


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_real_measurement_leaves_the_model_alone(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with batches of one image, whose last map is a single value that batch norm could not normalise."""
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    model = Network("torchvision:densenet121", 32, 1).model(FedAvg())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = choose_arithmetic(model, TrainingOptions(**AUTO, batch_size=batch_size), 32, CPU, None)
    assert all(setting in CHOICES[key] for key, setting in zip(CHOICES, chosen(found), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
