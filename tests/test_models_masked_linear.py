"""The masked linear layer and FedMedCLIP's two parts, against counts and gradients worked out by hand."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from wardround.models.feature_attention import FeatureAttention, InstanceNorm, PrivateMLP
from wardround.models.masked_linear import LARGEST, MaskedLinear, dst_slope, reference_slope, settle


def layer(surrogate: str = "dst", inputs: int = 4, outputs: int = 3) -> MaskedLinear:
    torch.manual_seed(0)
    return MaskedLinear(inputs, outputs, surrogate)  # type: ignore[arg-type]


def test_counts_of_the_paper() -> None:
    """Two ML(512, 512) are 526,336 numbers; the private classifier 793,604, 795,146 and 795,660 for 2, 5, 6 classes."""
    attention = FeatureAttention(512)
    assert sum(p.numel() for p in attention.parameters()) == 526_336
    assert 526_336 * 4 == 2_105_344
    sizes = {classes: sum(p.numel() for p in PrivateMLP(512, classes).parameters()) for classes in (2, 5, 6)}
    assert sizes == {2: 793_604, 5: 795_146, 6: 795_660}


def test_all_outputs_are_kept_at_first() -> None:
    for surrogate in ("dst", "reference"):
        one = layer(surrogate, 512, 512)
        x = torch.randn(5, 512)
        torch.testing.assert_close(one(x), functional.linear(x, one.weight, one.bias))


def test_raising_one_threshold_silences_exactly_that_output() -> None:
    one = layer()
    x = torch.randn(5, 4)
    before = one(x)
    with torch.no_grad():
        one.threshold[1] = one.weight[1].abs().mean() + 0.01
    after = one(x)
    assert not after[:, 1].any(), "the bias is masked too"
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]])


def test_the_reference_leaves_the_bias() -> None:
    one = layer("reference")
    with torch.no_grad():
        one.threshold[1] = 1.0
    torch.testing.assert_close(one(torch.randn(5, 4))[:, 1], one.bias[1].expand(5))


def test_masking_the_output_is_masking_the_rows() -> None:
    one = layer()
    with torch.no_grad():
        one.threshold[2] = 1.0
    x, mask = torch.randn(5, 4), one.mask().detach()
    torch.testing.assert_close(one(x), functional.linear(x, one.weight * mask[:, None], one.bias * mask))


def test_the_surrogates_slope() -> None:
    """`2 - 4|x|` up to 0.4, then 0.4 up to 1, then nothing."""
    one = layer(outputs=4, inputs=1)
    with torch.no_grad():
        one.weight.fill_(0.5)
        one.bias.zero_()
        one.threshold.copy_(0.5 - torch.tensor([0.1, -0.3, 0.7, -1.2]))
    one(torch.ones(1, 1)).sum().backward()  # each product is W = 0.5, and its own row's mean is |W|
    slope = torch.tensor([1.6, 0.8, 0.4, 0.0])
    torch.testing.assert_close(one.threshold.grad, -0.5 * slope)
    kept = torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(one.weight.grad[:, 0], kept + 0.5 * slope)  # type: ignore[index]


@pytest.mark.parametrize("surrogate", ["dst", "reference"])
def test_gradients_are_those_of_the_chain_of_single_operations(surrogate: str) -> None:
    """The same by autograd, in float64: mask times product, the step with a slope that is put in its place."""
    one = layer(surrogate, 6, 5).double()
    with torch.no_grad():
        one.threshold.copy_(torch.tensor([0.0, 0.2, 0.9, -1.5, 0.3]))
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 5, dtype=torch.float64)
    (one(x) * weights).sum().backward()
    found = [x.grad, *(p.grad for p in one.parameters())]

    copies = [t.detach().clone().requires_grad_() for t in (x, one.weight, one.bias, one.threshold)]
    inputs, matrix, bias, threshold = copies
    above = matrix.abs().mean(1) - threshold
    slope = (dst_slope if surrogate == "dst" else reference_slope)(above).detach()
    mask = one.mask() + slope * (above - above.detach())  # value of the step, derivative of the slope
    if surrogate == "dst":
        expected = functional.linear(inputs, matrix, bias) * mask
    else:
        expected = functional.linear(inputs, matrix) * mask + bias
    (expected * weights).sum().backward()
    for ours, theirs in zip(found, [t.grad for t in copies], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_training_settles_before_it_computes_and_evaluation_changes_nothing() -> None:
    one = layer()
    with torch.no_grad():
        one.threshold.fill_(9.0)
    x = torch.randn(2, 4)
    assert not one.eval()(x).any()
    assert one.threshold.tolist() == [9.0] * 3
    assert one.train()(x).any(), "bounded, found collapsed, begun anew"
    assert not one.threshold.any()


def test_the_reference_mask_is_inert() -> None:
    """Of an untrained layer of the paper's size no threshold has a gradient."""
    one = layer("reference", 512, 512)
    one(torch.randn(8, 512)).square().sum().backward()
    assert one.threshold.grad is not None
    assert not one.threshold.grad.any()
    learned = layer("dst", 512, 512)
    learned(torch.randn(8, 512)).square().sum().backward()
    assert learned.threshold.grad is not None
    assert learned.threshold.grad.all()


def test_thresholds_settle_within_bounds_and_a_collapsed_mask_begins_anew() -> None:
    one = layer()
    with torch.no_grad():
        one.threshold.copy_(torch.tensor([-9.0, 0.0, 9.0]))
    settle(nn.Sequential(one))
    assert one.threshold.tolist() == [-LARGEST, 0.0, LARGEST]
    with torch.no_grad():
        one.threshold.fill_(9.0)
    one.settle()
    assert not one.threshold.any()


def test_instance_norm_is_torchs() -> None:
    x = torch.randn(6, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = nn.InstanceNorm1d(512)(x[None])[0]
    torch.testing.assert_close(InstanceNorm()(x), reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_attention_gives_vectors_of_length_one(norm: str) -> None:
    attention = FeatureAttention(16, norm).eval()  # type: ignore[arg-type]
    v = attention(torch.randn(1, 16))
    assert v.shape == (1, 16)
    torch.testing.assert_close(v.norm(dim=1), torch.ones(1))


def test_an_untrained_attention_hardly_turns_features() -> None:
    """The paper's size: the cosine between features and masked features is about 0.92 at the start."""
    torch.manual_seed(0)
    features = torch.randn(200, 512)
    cosine = functional.cosine_similarity(features, FeatureAttention(512)(features)).mean()
    assert 0.85 < float(cosine) < 0.97
