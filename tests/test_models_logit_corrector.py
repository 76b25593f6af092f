"""The four readings of the logit corrector, against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from wardround.models.classifier import build_classifier
from wardround.models.logit_corrector import LogitCorrector
from wardround.models.options import CorrectorKind, ModelOptions

COUNTS = [7, 0, 1]
PRIOR = torch.tensor([8 / 11, 1 / 11, 2 / 11])
"""(n + 1) / (N + C) with N = 8, C = 3."""
LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])


def corrector(kind: CorrectorKind, tau: float = 1.0) -> LogitCorrector:
    module = LogitCorrector(kind, 3, tau)
    module.set_counts(COUNTS)
    return module


def test_affine_starts_as_the_identity_and_acts_in_both_modes() -> None:
    module = corrector("affine")
    assert torch.equal(module(LOGITS), LOGITS)
    with torch.no_grad():
        module.scale.copy_(torch.tensor([2.0, 1.0, 0.0]))
        module.bias.copy_(torch.tensor([0.0, 3.0, 5.0]))
    expected = torch.tensor([[2.0, 1.0, 5.0], [0.0, 3.0, 5.0]])
    assert torch.equal(module.train()(LOGITS), expected)
    assert torch.equal(module.eval()(LOGITS), expected)


def test_prior_acts_in_training_only() -> None:
    module = corrector("prior", tau=2.0)
    torch.testing.assert_close(module.train()(LOGITS), LOGITS + 2 * PRIOR.log())
    with torch.no_grad():
        module.bias.fill_(3.0)
    torch.testing.assert_close(module.train()(LOGITS), LOGITS + 2 * PRIOR.log() + 3)
    assert torch.equal(module.eval()(LOGITS), LOGITS)


def test_fedlc_by_hand() -> None:
    """Margins n^(-1/4); the absent class counts as one image."""
    module = corrector("fedlc", tau=0.5)
    margin = 0.5 * torch.tensor([7**-0.25, 1.0, 1.0])
    torch.testing.assert_close(module.train()(LOGITS), LOGITS - margin)
    assert torch.equal(module.eval()(LOGITS), LOGITS)


def test_posthoc_acts_at_inference_only() -> None:
    module = corrector("posthoc", tau=2.0)
    assert torch.equal(module.train()(LOGITS), LOGITS)
    torch.testing.assert_close(module.eval()(LOGITS), LOGITS - 2 * PRIOR.log())


@pytest.mark.parametrize(
    ("kind", "names"),
    [("affine", ["scale", "bias"]), ("prior", ["bias"]), ("fedlc", []), ("posthoc", [])],
)
def test_counts_are_not_state(kind: CorrectorKind, names: list[str]) -> None:
    """Label counts describe a client's data; they must not travel with the model."""
    module = corrector(kind)
    assert list(module.state_dict()) == names == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("kind", ["prior", "fedlc", "posthoc"])
@pytest.mark.parametrize("training", [True, False])
def test_without_counts_no_prediction_changes(kind: CorrectorKind, training: bool) -> None:
    module = LogitCorrector(kind, 3).train(training)
    torch.testing.assert_close(functional.softmax(module(LOGITS), 1), functional.softmax(LOGITS, 1))


@pytest.mark.parametrize("counts", [[1, 2], [1, -1, 0], [[1, 2, 3]]])
def test_wrong_counts_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="3 counts >= 0"):
        LogitCorrector("prior", 3).set_counts(counts)


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=9), st.integers(0, 2**20))
def test_prior_is_the_balanced_softmax_with_smoothed_counts(counts: list[int], seed: int) -> None:
    """exp(z_y) (n_y + 1) / sum_c exp(z_c) (n_c + 1), and always finite."""
    module = LogitCorrector("prior", len(counts))
    module.set_counts(torch.tensor(counts))
    z = torch.randn(3, len(counts), generator=torch.Generator().manual_seed(seed))
    weighted: Tensor = z.exp() * (torch.tensor(counts) + 1)
    expected = weighted / weighted.sum(1, keepdim=True)
    torch.testing.assert_close(functional.softmax(module(z), 1), expected, rtol=1e-4, atol=1e-6)


def test_options_reach_the_model() -> None:
    options = ModelOptions(backbone="wardround:cnn", pretrained=False, logit_corrector="posthoc", corrector_tau=3.0)
    model = build_classifier(options, 2, 3, 28, seed=0).eval()
    assert isinstance(model.corrector, LogitCorrector)
    model.corrector.set_counts([3, 0])
    features = torch.rand(1, 512)
    change = model.classify(features) - model.head(features)
    torch.testing.assert_close(change, -3 * torch.tensor([[math.log(4 / 5), math.log(1 / 5)]]))
