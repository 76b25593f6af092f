"""Feature alignment: its variants at insertion, its count, and how far its gradients reach."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.models.backbones import load_backbone
from wardround.models.classifier import Classifier
from wardround.models.feature_alignment import FeatureAlignment, Variant, check_groups, insert_alignment


def maps(channels: int = 32, batch: int = 4) -> Tensor:
    """Feature maps with a mean and a scale of their own, `(batch, channels, 5, 5)`."""
    return 1.5 + 2 * torch.randn(batch, channels, 5, 5, generator=torch.Generator().manual_seed(0))


def trained(layer: FeatureAlignment) -> FeatureAlignment:
    """Move every parameter off its start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return layer


def by_hand(layer: FeatureAlignment, x: Tensor, groups: int) -> Tensor:
    """SiLU(conv1x1(GN(x))) from sums and products only."""
    grouped = x.view(len(x), groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    standard = (centred / (centred.pow(2).mean(2, keepdim=True) + 1e-5).sqrt()).view_as(x)
    norm = standard * layer.norm.weight.view(-1, 1, 1) + layer.norm.bias.view(-1, 1, 1)
    mixed = torch.einsum("oc,bchw->bohw", layer.conv.weight[:, :, 0, 0], norm)
    z = mixed + layer.conv.bias.view(-1, 1, 1)
    return z / (1 + (-z).exp())


def test_the_convolution_starts_as_the_exact_identity() -> None:
    layer = FeatureAlignment(32)
    assert torch.equal(layer.conv(maps()), maps())


@pytest.mark.parametrize("move", [False, True])
def test_exact_by_hand(move: bool) -> None:
    layer = FeatureAlignment(32, groups=8)
    if move:
        trained(layer)
    torch.testing.assert_close(layer(maps()), by_hand(layer, maps(), 8), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["delta", "gated", "conv_only"])
def test_the_other_variants_start_as_the_identity(variant: Variant) -> None:
    layer = FeatureAlignment(32, variant=variant)
    torch.testing.assert_close(layer(maps()), maps(), rtol=2e-7, atol=2e-7)
    assert layer.insertion_change(maps()) <= 2e-7


def test_delta_and_gated_after_training() -> None:
    x = maps()
    delta, gated = (trained(FeatureAlignment(32, 8, variant)) for variant in ("delta", "gated"))
    start = by_hand(FeatureAlignment(32, 8), x, 8)
    torch.testing.assert_close(delta(x), x + by_hand(delta, x, 8) - start, rtol=1e-4, atol=1e-5)
    gate = gated.gate.view(-1, 1, 1)
    torch.testing.assert_close(gated(x), x + gate * (by_hand(gated, x, 8) - x), rtol=1e-4, atol=1e-5)


def test_exact_is_far_from_the_identity_when_inserted() -> None:
    """SiLU of a standard normal has a relative error of 0.60; a mean and a scale make it worse."""
    layer = FeatureAlignment(32)
    standard = torch.randn(64, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    assert layer.insertion_change(standard) == pytest.approx(0.60, abs=0.01)
    assert layer.insertion_change(maps()) > 0.6
    assert layer.insertion_change(torch.zeros(1, 32, 2, 2)) == 0


@pytest.mark.parametrize(
    ("variant", "elements"), [("exact", 50_320), ("delta", 50_320), ("gated", 50_624), ("conv_only", 49_712)]
)
def test_parameter_counts_at_the_sites_of_pafp(variant: Variant, elements: int) -> None:
    layers = [FeatureAlignment(channels, variant=variant) for channels in (112, 192)]
    assert sum(value.numel() for layer in layers for value in layer.state_dict().values()) == elements


def test_first_gradients() -> None:
    """A closed gate keeps the rest of `gated` from learning; `delta` learns at once."""

    def reached(variant: Variant) -> set[str]:
        layer = FeatureAlignment(32, variant=variant)
        layer(maps()).pow(2).sum().backward()
        return {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}

    assert reached("gated") == {"gate"}
    assert reached("delta") == {"norm.weight", "norm.bias", "conv.weight", "conv.bias"}


@pytest.mark.parametrize(("groups", "channels"), [(32, 112), (3, 112), (0, 112), (224, 112)])
def test_groups_that_do_not_divide_are_refused(groups: int, channels: int) -> None:
    with pytest.raises(InputError, match=r"groups = \d+ does not divide 112 .*1, 2, 4, 7, 8, 14, 16, 28, 56, 112\)"):
        FeatureAlignment(channels, groups)


def test_groups_must_divide_every_site() -> None:
    with pytest.raises(InputError, match=r"7 does not divide 112 and 192 channels \(allowed: 1, 2, 4, 8, 16\)"):
        check_groups(7, [112, 192])


def test_recording() -> None:
    layer = trained(FeatureAlignment(32))
    assert layer(maps()) is not None
    assert layer.recorded is None
    layer.recording = True
    output = layer(maps())
    assert layer.recorded is output
    assert output.requires_grad
    layer.recording = False
    layer(maps())
    assert layer.recorded is None


@pytest.mark.parametrize("variant", get_args(Variant))
def test_the_pre_activation_can_be_recorded(variant: Variant) -> None:
    layer = trained(FeatureAlignment(32, variant=variant, statistic="pre_activation"))
    layer.recording = True
    layer(maps())
    assert layer.recorded is not None
    torch.testing.assert_close(layer.recorded, layer.conv(layer.norm(maps())))


def test_a_recording_layer_can_be_copied() -> None:
    layer = FeatureAlignment(32)
    layer.recording = True
    layer(maps())
    twin = copy.deepcopy(layer)
    assert twin.recorded is None
    assert layer.recorded is not None
    assert torch.equal(twin(maps()), layer(maps()))


@lru_cache
def lite0() -> Classifier:
    """EfficientNet-Lite0 with two tuned blocks and an alignment layer before each."""
    model = Classifier(load_backbone("timm:tf_efficientnet_lite0", pretrained=False, seed=0), 4, 2)
    for layer in insert_alignment(model, 64):
        layer.recording = True
    return model


def reach(loss: Tensor, model: nn.Module) -> set[str]:
    """The parts of `model` (first two words of a parameter's name) that `loss` has a gradient for."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, allow_unused=True)
    return {".".join(name.split(".")[:2]) for (name, _), g in zip(named, gradients, strict=True) if g is not None}


@pytest.mark.parametrize(("site", "expected"), [(0, {"before.0"}), (1, {"before.0", "tuned.0", "before.1"})])
def test_how_far_the_alignment_gradient_reaches(site: int, expected: set[str]) -> None:
    model = lite0().train()
    logits = model(model.prefix(torch.randn(2, 3, 64, 64)))
    record = model.before[site].recorded
    assert isinstance(record, Tensor)
    assert reach(record.var(0).mean(), model) == expected
    everything = {"before.0", "tuned.0", "before.1", "tuned.1", "head.weight", "head.bias"}
    assert reach(functional.cross_entropy(logits, torch.tensor([0, 1])), model) == everything


def test_insertion_into_a_classifier() -> None:
    model = lite0()
    layers = list(model.before)
    assert [layer.conv.in_channels for layer in layers] == [112, 192]
    names = [name for name in model.state_dict() if name.startswith("before.0")]
    assert names == [f"before.0.{name}" for name in ("norm.weight", "norm.bias", "conv.weight", "conv.bias")]
    assert model.site_shapes(64) == [(112, 4, 4), (192, 2, 2)]


def test_a_single_image_is_finite() -> None:
    model = lite0().eval()
    assert torch.isfinite(model(model.prefix(torch.randn(1, 3, 64, 64)))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"groups": 7}, r"allowed: 1, 2, 4, 8, 16\)"), ({"groups": 32}, "does not divide 112 and 192")],
)
def test_insertion_checks_groups_before_it_changes_anything(options: dict[str, Any], message: str) -> None:
    model = lite0()
    kept = list(model.before)
    with pytest.raises(InputError, match=message):
        insert_alignment(model, 64, **options)
    assert list(model.before) == kept


def test_tokens_cannot_be_aligned() -> None:
    model = Classifier(load_backbone("wardround:vit-tiny", pretrained=False, image_size=32, seed=0), 4, 2)
    with pytest.raises(InputError, match=r"feature maps .* passes \(17, 64\) between its blocks"):
        insert_alignment(model, 32)
