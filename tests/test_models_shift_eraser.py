"""FDSE's layers: what they compute, how many parameters they have, and where they are put."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.methods.fdse import FDSE
from wardround.methods.trial import Network
from wardround.models.records import recording
from wardround.models.shift_eraser import (
    DecomposedConvolution,
    InsertedEraser,
    decompose_convolutions,
    insert_erasers,
    shift_erasers,
)

Layers = Literal["before-blocks", "convolutions"]
B0 = Network("torchvision:efficientnet_b0", 64, 2)


def maps(channels: int = 6, batch: int = 4) -> Tensor:
    """Feature maps with a mean and a scale of their own, `(batch, channels, 7, 7)`."""
    return 1.5 + 2 * torch.randn(batch, channels, 7, 7, generator=torch.Generator().manual_seed(0))


def moved(layer: Any) -> Any:
    """Every parameter off its start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer


def standard(x: Tensor) -> Tensor:
    """x with mean 0 and variance 1 per channel, from sums alone."""
    centred = x - x.mean((0, 2, 3), keepdim=True)
    return centred / (centred.pow(2).mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()


def scaled_and_convolved(x: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """What the eraser makes of maps, the 3x3 convolution as a sum over its nine shifts."""
    scale = layer.eraser.scale
    scaled = standard(x) * scale.weight.view(-1, 1, 1) + scale.bias.view(-1, 1, 1)
    padded, (rows, columns) = functional.pad(scaled, (1, 1, 1, 1)), x.shape[2:]
    shifts = [
        layer.eraser.depthwise.weight[:, 0, i, j].view(-1, 1, 1) * padded[:, :, i : i + rows, j : j + columns]
        for i in range(3)
        for j in range(3)
    ]
    return scaled, torch.stack(shifts).sum(0)


# ---- the layers


@pytest.mark.parametrize(
    ("outputs", "keys"),
    [
        (8, {}),
        (7, {"padding": 1}),
        (1, {}),
        (10, {"stride": 2, "bias": False}),
        (4, {"padding": "same", "dilation": 2}),
    ],
)
def test_a_decomposed_convolution_has_the_shape_of_the_other(outputs: int, keys: dict[str, Any]) -> None:
    convolution = nn.Conv2d(6, outputs, 3, **keys)
    assert DecomposedConvolution(convolution)(maps()).shape == convolution(maps()).shape


@pytest.mark.parametrize("outputs", [8, 7])
def test_a_decomposed_convolution_by_hand(outputs: int) -> None:
    convolution = nn.Conv2d(6, outputs, 3, padding=1)
    layer = moved(DecomposedConvolution(convolution))
    extracted = functional.conv2d(maps(), layer.extractor.weight, padding=1)
    assert extracted.shape[1] == 4
    both = torch.cat(scaled_and_convolved(extracted, layer), dim=1)[:, :outputs]
    closed = standard(both + layer.bias.view(-1, 1, 1))
    expected = closed * layer.closing.weight.view(-1, 1, 1) + layer.closing.bias.view(-1, 1, 1)
    torch.testing.assert_close(layer(maps()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs", "kernel"), [(6, 8, 3), (5, 7, 1), (16, 32, 5)])
def test_parameters_of_a_decomposed_convolution(inputs: int, outputs: int, kernel: int) -> None:
    """Half the filters; scale and shift and nine weights per extracted map; a bias and the closing batch norm."""
    half = (outputs + 1) // 2
    layer = DecomposedConvolution(nn.Conv2d(inputs, outputs, kernel))
    expected = inputs * half * kernel**2 + (2 + 9) * half + (1 + 2) * outputs
    assert sum(parameter.numel() for parameter in layer.parameters()) == expected


def test_the_extractor_starts_from_the_first_filters_and_keeps_its_class() -> None:
    class Padding(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(functional.pad(x, (2, 0, 2, 0)))

    convolution = Padding(6, 9, 3)
    layer = DecomposedConvolution(convolution)
    assert isinstance(layer.extractor, Padding)
    assert torch.equal(layer.extractor.weight, convolution.weight[:5])
    assert convolution.weight.shape[0] == 9
    assert layer(maps()).shape == convolution(maps()).shape


@pytest.mark.parametrize("training", [True, False])
def test_an_inserted_eraser_starts_as_the_identity(training: bool) -> None:
    layer = InsertedEraser(6).train(training)
    assert torch.equal(layer(maps()), maps())


def test_an_inserted_eraser_by_hand() -> None:
    layer = moved(InsertedEraser(6))
    torch.testing.assert_close(layer(maps()), maps() + scaled_and_convolved(maps(), layer)[1], rtol=1e-4, atol=1e-5)
    assert sum(parameter.numel() for parameter in layer.parameters()) == (2 + 9) * 6


def test_the_first_gradient_of_an_inserted_eraser_reaches_its_convolution() -> None:
    layer = InsertedEraser(6)
    layer(maps()).square().sum().backward()
    assert layer.eraser.depthwise.weight.grad is not None
    assert layer.eraser.depthwise.weight.grad.abs().max() > 0


@pytest.mark.parametrize("layer", [InsertedEraser(6), DecomposedConvolution(nn.Conv2d(6, 6, 1))])
def test_closing_measures_what_is_recorded(layer: Any) -> None:
    """A tenth of the first batch's moments, unbiased as torch has them; what is measured is what is recorded."""
    with recording([layer]):
        layer.train()(maps())
        h = layer.recorded
    torch.testing.assert_close(layer.closing.running_mean, 0.1 * h.mean((0, 2, 3)))
    torch.testing.assert_close(layer.closing.running_var, 0.9 + 0.1 * h.transpose(0, 1).flatten(1).var(1))
    assert layer.recorded is None
    layer(maps())
    assert layer.recorded is None


def test_an_inserted_eraser_measures_nothing_in_eval_mode() -> None:
    layer = InsertedEraser(6).eval()
    layer(maps())
    assert not layer.closing.num_batches_tracked
    assert not layer.closing.running_mean.any()


def test_a_recorded_graph_is_neither_copied_nor_pickled() -> None:
    layer = InsertedEraser(6)
    with recording([layer]):
        layer(maps().requires_grad_())
        assert layer.recorded is not None
        assert copy.deepcopy(layer).recorded is None
        assert pickle.loads(pickle.dumps(layer)).recorded is None


# ---- where they are put


@pytest.mark.parametrize(
    ("network", "layers", "channels"),
    [
        (Network("wardround:cnn-bn", 20, 2), "before-blocks", [32, 64]),
        (Network("wardround:cnn-bn", 20, 2), "convolutions", [32]),
        (Network("wardround:cnn-bn", 20, "all"), "before-blocks", [3, 32, 64]),
        (Network("wardround:cnn-bn", 20, "all"), "convolutions", [16, 32]),
        (Network("wardround:resnet4", 16, 1), "before-blocks", [168]),
        (Network("wardround:resnet4", 16, 1), "convolutions", [84, 84]),
        (B0, "before-blocks", [112, 192]),
    ],
)
def test_where_erasers_are_put(network: Network, layers: Layers, channels: list[int]) -> None:
    """By the maps that they take; blocks that are frozen have none."""
    model = network.model(FDSE(layers=layers))
    assert [layer.norm.num_features for layer in shift_erasers(model)] == channels
    assert not shift_erasers(model.frozen)


def test_grouped_convolutions_stay() -> None:
    model = B0.model(FDSE(layers="convolutions"))
    left = [m for m in model.tuned.modules() if type(m) is nn.Conv2d and m.kernel_size != (1, 1) and m.groups > 1]
    assert len([m for m in left if m.kernel_size == (5, 5)]) == 4  # one in each of features[6]'s blocks
    outside = [m for layer in shift_erasers(model) for m in (layer, *layer.modules())]
    dense = [m for m in model.tuned.modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    assert dense
    assert all(any(m is inner for inner in outside) for m in dense)


@pytest.mark.parametrize("layers", ["before-blocks", "convolutions"])
def test_the_edited_efficientnet_runs(layers: Layers) -> None:
    model = B0.model(FDSE(layers=layers)).train()
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    logits = model.logits_of_images(images)
    assert logits.shape == (2, 4)
    assert torch.isfinite(logits).all()


def test_inserting_changes_no_logit() -> None:
    plain, edited = (B0.model(FDSE()).eval() for _ in range(2))
    plain.before = nn.ModuleList(nn.Identity() for _ in plain.before)
    images = torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(plain.logits_of_images(images), edited.logits_of_images(images))


def test_networks_without_a_place_are_refused() -> None:
    dense = Network("wardround:cnn-bn", 20, 1).model(FDSE())
    with pytest.raises(InputError, match="needs convolutions, and 'wardround:cnn-bn' has none"):
        decompose_convolutions(dense)
    with pytest.raises(InputError, match="finetune_blocks = 0"):
        Network("wardround:cnn-bn", 20, 0).model(FDSE())
    with pytest.raises(InputError, match="feature maps between blocks, and 'wardround:vit-tiny' passes tokens"):
        Network("wardround:vit-tiny", 16, 2).model(FDSE())
    insert_erasers(dense, 20)  # in front of the dense block, which takes maps
    assert len(shift_erasers(dense)) == 1
