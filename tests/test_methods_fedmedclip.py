"""FedMedCLIP's losses by hand, its ensemble at its limits, and what travels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from wardround.errors import InputError
from wardround.federation.codecs import codec_named
from wardround.federation.messages import Message, named
from wardround.federation.rules import Owner
from wardround.methods.base import ServerSide
from wardround.methods.clip_losses import (
    agreement_loss,
    batch_divergences,
    certainty,
    entropy,
    mixture,
)
from wardround.methods.fedmedclip import FedMedCLIP
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.models.prompts import Aside, Prompts, TextOptions, prompts_for
from wardround.training.losses import contrastive_loss

CLASSES = ("naevus", "melanoma", "keratosis")


class ToyTower:
    """A text side whose vectors depend on the words alone."""

    dim = 64
    context_width = 8

    def encode(self, texts: Sequence[str]) -> Tensor:
        seeds = [sum(map(ord, text)) for text in texts]
        return torch.stack([torch.randn(self.dim, generator=torch.Generator().manual_seed(s)) for s in seeds])


def clip_model(classes: Sequence[str] = CLASSES, size: int = 64) -> Classifier:
    """A small frozen network whose 64 features stand for those of an encoder."""
    options = ModelOptions(backbone="wardround:resnet4-lib", pretrained=False, finetune_blocks=0, dropout=0.0)
    model = build_classifier(options, len(classes), 3, 32, seed=0)
    assert model.head.in_features == size
    model.prompts = prompts_for(ToyTower(), classes, TextOptions(), 100.0, seed=0)  # type: ignore[arg-type]
    return model


# ---- losses


def test_the_worked_divergences() -> None:
    """B = 2, C = 1, T = 2, p = (2, 0), q = (0, 0)."""
    p, q = torch.tensor([[2.0], [0.0]]), torch.zeros(2, 1)
    forward, backward = batch_divergences(p, q, 2.0)
    assert float(forward) == pytest.approx(0.11094, abs=1e-5)
    assert float(backward) == pytest.approx(0.12011, abs=1e-5)
    half = agreement_loss(p, q, torch.tensor([0.9, 0.7]), "symmetric", 2.0)
    assert float(half) == pytest.approx((0.11094 + 0.12011) / 2, abs=1e-5)
    weighed = agreement_loss(p, q, torch.tensor([0.9, 0.7]), "entropy", 2.0)
    assert float(weighed) == pytest.approx(0.8 * 0.11094 + 0.2 * 0.12011, abs=1e-5)


def test_divergences_over_the_batch_have_the_invariances_of_the_batch() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(7, 3), torch.randn(7, 3)
    base = torch.stack(batch_divergences(p, q, 2.0))
    assert float(torch.stack(batch_divergences(p, p, 2.0)).abs().max()) < 1e-6
    torch.testing.assert_close(torch.stack(batch_divergences(p + torch.tensor([3.0, -1.0, 0.0]), q, 2.0)), base)
    order = torch.randperm(7)
    torch.testing.assert_close(torch.stack(batch_divergences(p[order], q[order], 2.0)), base)
    shifted = p.clone()
    shifted[2] += 3
    assert not torch.allclose(torch.stack(batch_divergences(shifted, q, 2.0)), base)


def test_the_contrastive_loss_by_numpy() -> None:
    rng = np.random.default_rng(0)
    v, t, y = rng.normal(size=(5, 4)), rng.normal(size=(3, 4)), np.array([0, 1, 1, 2, 0])
    similarity = 10 * v @ t[y].T

    def nll(s: np.ndarray, target: np.ndarray) -> float:
        log_p = s - np.log(np.exp(s).sum(1, keepdims=True))
        return float(-(target * log_p).sum(1).mean())

    logits, labels = torch.from_numpy(10 * v @ t.T), torch.from_numpy(y)
    eye = np.eye(5)
    instance = (nll(similarity, eye) + nll(similarity.T, eye)) / 2
    assert float(contrastive_loss(logits, labels, "instance")) == pytest.approx(instance)
    same = (y[:, None] == y[None]) / (y[:, None] == y[None]).sum(1, keepdims=True)
    supervised = (nll(similarity, same) + nll(similarity.T, same)) / 2
    assert float(contrastive_loss(logits, labels, "supervised")) == pytest.approx(supervised)


def test_the_instance_loss_has_a_floor() -> None:
    """A perfect embedding of balanced classes: log(B / C), 1.67 for 32 images of 6 classes."""
    labels = torch.arange(30) % 6
    logits = 100 * functional.one_hot(labels, 6).float()
    assert float(contrastive_loss(logits, labels, "instance")) == pytest.approx(math.log(30 / 6), abs=1e-4)
    assert float(contrastive_loss(logits, labels, "supervised")) == pytest.approx(math.log(30 / 6), abs=1e-4)


# ---- the ensemble


def test_certainty_at_its_limits() -> None:
    sure, unsure = torch.tensor([[1.0, 0.0, 0.0]]), torch.full((1, 3), 1 / 3)
    half = torch.tensor([[0.5, 0.5, 0.0]])
    assert float(certainty(half, half[:, [2, 0, 1]], "true")) == pytest.approx(0.5)
    assert float(certainty(sure, unsure, "true")) == pytest.approx(1.0)
    assert float(certainty(unsure, sure, "true")) == pytest.approx(0.0)
    assert float(certainty(sure, sure, "true")) == 0.5


@pytest.mark.parametrize(("classes", "least", "most"), [(2, 0.311, 0.689), (6, 0.368, 0.632)])
def test_the_published_entropy_can_hardly_choose(classes: int, least: float, most: float) -> None:
    """Probabilities that are softmaxed once more."""
    sure = functional.one_hot(torch.tensor([0]), classes).float()
    unsure = torch.full((1, classes), 1 / classes)
    low = torch.softmax(sure, 1)
    expected = float(-(low * low.log()).sum())
    assert float(entropy(sure, "reference")) == pytest.approx(expected, abs=1e-6)
    assert least <= float(certainty(unsure, sure, "reference")) <= float(certainty(sure, unsure, "reference")) <= most


def test_the_mixture_is_a_distribution_between_its_parts() -> None:
    torch.manual_seed(0)
    mlp, fam = torch.randn(4, 3), torch.randn(4, 3)
    p_mlp, p_fam = torch.softmax(mlp, 1), torch.softmax(fam, 1)
    alpha = certainty(p_mlp, p_fam, "true")[:, None]
    found = torch.softmax(mixture(mlp, fam, "true"), 1)
    torch.testing.assert_close(found, alpha * p_mlp + (1 - alpha) * p_fam)


# ---- the method


def test_who_owns_what() -> None:
    model, method = clip_model(), FedMedCLIP(hidden=16)
    method.edit(model, 32)
    rules = method.rules(model)
    assert all(name.startswith("neck.") for name in rules.names(Owner.SHARED))
    assert {"neck.first.threshold", "neck.second.threshold"} <= set(rules.names(Owner.SHARED))
    assert all(name.startswith("head.") for name in rules.names(Owner.LOCAL))
    assert "prompts.vectors" in rules.names(Owner.FROZEN)
    alone = FedMedCLIP(hidden=16, aggregate=False).rules(model)
    assert not alone.names(Owner.SHARED)


def test_the_message_of_the_papers_size() -> None:
    """526,336 numbers; float16 and zlib: within 2 % of 946,000 bytes at the start, and 2^-11 away at most."""
    from wardround.models.feature_attention import FeatureAttention

    torch.manual_seed(0)
    state = FeatureAttention(512).state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == 526_336
    codec = codec_named("float16+zlib")
    frame = codec.encode(Message(named("state", state)))
    assert abs(len(frame) - 946_000) <= 0.02 * 946_000
    back = codec.decode(frame).under("state")
    for name, tensor in state.items():
        assert float((back[name] - tensor).abs().max()) <= float(tensor.abs().max()) * 2**-11
    shuffled = len(codec_named("float16+shuffle+zlib").encode(Message(named("state", state))))
    assert shuffled < len(frame)


def test_only_an_encoder_with_text_will_do() -> None:
    options = ModelOptions(backbone="wardround:resnet4-lib", pretrained=False, finetune_blocks=0)
    with pytest.raises(InputError, match="has no text side, which fedmedclip needs"):
        FedMedCLIP().edit(build_classifier(options, 3, 3, 32, seed=0), 32)
    tuned = ModelOptions(backbone="wardround:resnet4-lib", pretrained=False, finetune_blocks=1)
    model = build_classifier(tuned, 3, 3, 32, seed=0)
    model.prompts = clip_model().prompts
    with pytest.raises(InputError, match=r"finetune_blocks: fedmedclip trains on the frozen encoder's features"):
        FedMedCLIP().edit(model, 32)


def test_sides_know_their_method() -> None:
    model, method = clip_model(), FedMedCLIP(hidden=16)
    method.edit(model, 32)
    side = ServerSide(method, model, 32)
    assert side.statistic_elements == 0
    assert set(side.reply_schema("train")) == {f"state/{name}" for name in side.initial_state}


# ---- prompts


def test_prompts_are_means_of_sentences() -> None:
    options = TextOptions(
        templates=("a {class}", "the {class}"), names={"melanoma": "a melanoma"}, descriptions={"naevus": ("brown",)}
    )
    found = prompts_for(ToyTower(), CLASSES, options, 100.0, seed=0)  # type: ignore[arg-type]
    sentences = ToyTower().encode(["a naevus", "the naevus", "brown"])
    expected = functional.normalize(functional.normalize(sentences, dim=1).mean(0), dim=0)
    torch.testing.assert_close(found.vectors[0], expected)
    assert found.names == ("naevus", "a melanoma", "keratosis")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"names": {"mole": "x"}}, "there is no class 'mole'"),
        ({"names": {"naevus": "melanoma"}}, "'melanoma' stands for several classes"),
        ({"names": {"naevus": " "}}, "'an empty name' stands for several classes, or none"),
    ],
)
def test_names_must_tell_classes_apart(options: dict[str, dict[str, str]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        prompts_for(ToyTower(), CLASSES, TextOptions(**options), 100.0, seed=0)  # type: ignore[arg-type]


def test_a_template_without_a_slot_is_named() -> None:
    with pytest.raises(ValueError, match=r"'a picture' has no \{class\}"):
        TextOptions(templates=("a picture",))


def test_the_tower_is_no_part_of_the_model() -> None:
    import copy

    prompts = clip_model().prompts
    assert isinstance(prompts, Prompts)
    assert copy.deepcopy(prompts).tower is prompts.tower
    assert list(prompts.state_dict()) == ["vectors"]
    aside = Aside(object())
    assert copy.deepcopy(aside) is aside


def test_random_text_is_a_control_that_reproduces() -> None:
    one, two = (prompts_for(ToyTower(), CLASSES, TextOptions(random=True), 100.0, seed=s) for s in (0, 0))  # type: ignore[arg-type]
    torch.testing.assert_close(one.vectors, two.vectors)
    assert not torch.allclose(one.vectors, clip_model().prompts.vectors)  # type: ignore[arg-type]
