"""Backbones: cutting changes nothing, counts are the published ones, wrong names are explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from wardround.errors import InputError
from wardround.models.backbones import Backbone, load_backbone
from wardround.models.backbones.registry import SOURCES
from wardround.models.backbones.timm_source import cut_transformer
from wardround.models.catalogue import BACKBONES, CITATIONS

CUT = {
    "torchvision:resnet18": (5, 64),
    "torchvision:densenet121": (5, 64),
    "torchvision:efficientnet_b0": (8, 64),
    "torchvision:convnext_tiny": (5, 64),
    "timm:resnet18": (5, 64),
    "timm:densenet121": (5, 64),
    "timm:tf_efficientnet_lite0": (8, 64),
    "timm:mobilenetv2_050": (8, 64),
    "timm:vit_tiny_patch16_224": (13, 32),
    "timm:convnext_atto": (5, 64),
    "wardround:resnet4": (2, 96),
    "wardround:resnet4-lib": (2, 64),
    "wardround:vit-tiny": (5, 32),
}
"""Name -> number of blocks, and an image size in pixels that is enough for a test."""


def rough(network: nn.Module) -> nn.Module:
    """Move norms, biases, tokens and layer scales off their start, so that no layer acts as an identity."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point() and tensor.ndim != 4:
            tensor.data += 0.1 * torch.rand(tensor.shape, generator=generator)
    return network.eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def built(name: str, image_size: int) -> tuple[nn.Module, Backbone]:
    """The library's own network, and the backbone that shares its tensors."""
    prefix, _, architecture = name.partition(":")
    network = SOURCES[prefix].build(architecture, channels=3, image_size=image_size)
    return network, SOURCES[prefix].cut(network, architecture)


@torch.no_grad()
def check_cut(network: nn.Module, backbone: Backbone, size: int) -> None:
    """Blocks and pooling are the network, own all of its parameters, and leave their inputs alone.

    The last matters because a block's input may be cached.
    """
    rough(network)
    expected = network(noise(2, 3, size, size))
    h = noise(2, 3, size, size)
    for block in backbone.eval().blocks:
        kept, given = h.clone(), h
        h = block(h)
        assert torch.equal(given, kept)
    torch.testing.assert_close(backbone.pool(h), expected, rtol=1e-5, atol=1e-5)
    assert expected.shape == (2, backbone.features)
    assert {id(p) for p in backbone.parameters()} == {id(p) for p in network.parameters()}
    assert not backbone.pool.state_dict()


@pytest.mark.parametrize("name", CUT)
def test_blocks_and_pool_compose_to_the_original_network(name: str) -> None:
    blocks, size = CUT[name]
    network, backbone = built(name, size)
    assert len(backbone.blocks) == blocks
    check_cut(network, backbone, size)


def test_small_torchvision_transformer() -> None:
    """The class of vit_b_16 with fewer and narrower blocks."""
    network = VisionTransformer(32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=32)
    network.heads = nn.Identity()
    check_cut(network, SOURCES["torchvision"].cut(network, "vit_b_16"), 32)


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False, "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "token", "pre_norm": True, "final_norm": False},
    ],
)
def test_timm_transformers_pool_in_different_ways(options: dict[str, Any]) -> None:
    network = timm.models.VisionTransformer(
        img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=0, **options
    )
    check_cut(network, cut_transformer(network, "timm:vit"), 32)


@pytest.mark.parametrize("record", [r for r in BACKBONES if "*" not in r.name], ids=lambda r: r.name)
def test_catalogue_tells_the_truth(record) -> None:
    small = record.name.startswith("wardround:cnn")
    with torch.device("meta"):  # shapes without memory
        backbone = load_backbone(
            record.name, pretrained=False, channels=1 if small else 3, image_size=28 if small else 224, seed=0
        )
    assert sum(p.numel() for p in backbone.parameters()) == record.parameters
    assert (backbone.name, backbone.family) == (record.name, record.family)
    assert backbone.citation == record.citation == CITATIONS[record.family]


def test_patterns_of_the_catalogue_can_be_cut() -> None:
    examples = {
        "timm:*efficientnet*": "timm:efficientnet_b0",
        "timm:*resnet*": "timm:resnet10t",
        "timm:densenet*": "timm:densenet121",
        "timm:vit_*": "timm:vit_tiny_patch16_224",
        "timm:convnext*": "timm:convnext_atto",
        "torchvision:efficientnet_*": "torchvision:efficientnet_v2_s",
        "torchvision:*resne*t*": "torchvision:resnext50_32x4d",
        "torchvision:densenet*": "torchvision:densenet121",
        "torchvision:vit_*": "torchvision:vit_b_32",
        "torchvision:convnext_*": "torchvision:convnext_tiny",
    }
    patterns = {record.name: record.family for record in BACKBONES if "*" in record.name}
    assert patterns.keys() == examples.keys()
    for pattern, name in examples.items():
        with torch.device("meta"):
            assert built(name, 64)[1].family == patterns[pattern]


@pytest.mark.parametrize(
    ("name", "classes", "channels", "size", "total"),
    [
        ("resnet4", 37, 3, 224, 519_829),
        ("resnet4-stride4", 37, 3, 64, 519_829),
        ("resnet4-lib", 37, 3, 224, 85_925),
        ("cnn", 9, 1, 28, 581_513),
        ("cnn", 10, 1, 28, 582_026),
    ],
)
def test_published_counts_with_a_head(name: str, classes: int, channels: int, size: int, total: int) -> None:
    backbone = load_backbone(f"wardround:{name}", pretrained=False, channels=channels, image_size=size, seed=0)
    assert sum(p.numel() for p in backbone.parameters()) + (backbone.features + 1) * classes == total


def test_resnet4_maps() -> None:
    """The stem pools only above 64 pixels; its stride is 2 or 4."""

    def side(name: str, size: int) -> int:
        backbone = load_backbone(name, pretrained=False, image_size=size, seed=0)
        return int(backbone.blocks[0](torch.zeros(1, 3, size, size)).shape[-1])

    assert side("wardround:resnet4", 224) == 56
    assert side("wardround:resnet4-stride4", 224) == 28
    assert side("wardround:resnet4", 64) == 32


@pytest.mark.parametrize(("size", "flat"), [(28, 4), (32, 5), (64, 13), (224, 13)])
def test_cnn_fits_its_dense_layer_to_the_image(size: int, flat: int) -> None:
    backbone = load_backbone("wardround:cnn", pretrained=False, channels=3, image_size=size, seed=0)
    dense = next(layer for layer in backbone.blocks[2] if isinstance(layer, nn.Linear))
    assert dense.in_features == 64 * flat * flat
    assert backbone(torch.zeros(2, 3, size, size)).shape == (2, 512)


def test_cnn_norms() -> None:
    def kinds(name: str) -> list[type]:
        backbone = load_backbone(name, pretrained=False, channels=1, image_size=28, seed=0)
        return [type(m) for m in backbone.modules() if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))]

    assert kinds("wardround:cnn") == []
    assert kinds("wardround:cnn-bn") == [nn.BatchNorm2d] * 2
    assert kinds("wardround:cnn-gn") == [nn.GroupNorm] * 2


def test_normalise_by_hand() -> None:
    backbone = load_backbone("torchvision:resnet18", pretrained=False, seed=0)
    assert backbone.mean == (0.485, 0.456, 0.406)
    images = torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8)
    expected = [-0.485 / 0.229, (1 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    torch.testing.assert_close(backbone.normalise(images), torch.tensor(expected).view(1, 3, 1, 1))


def test_grey_images_are_repeated_and_colour_is_refused_by_one_channel() -> None:
    colour = load_backbone("wardround:resnet4", pretrained=False, image_size=28, seed=0)
    grey = load_backbone("wardround:cnn", pretrained=False, channels=1, image_size=28, seed=0)
    image = torch.arange(28 * 28).remainder(256).to(torch.uint8).view(1, 28, 28, 1)
    assert torch.equal(colour.normalise(image), colour.normalise(image.expand(-1, -1, -1, 3)))
    assert grey.channels == 1
    with pytest.raises(InputError, match="3 channels, the backbone takes 1"):
        grey.normalise(image.expand(-1, -1, -1, 3))
    with pytest.raises(TypeError, match="uint8"):
        grey.normalise(image.float())


def test_the_seed_alone_decides_the_weights() -> None:
    def weight(seed: int) -> Tensor:
        return load_backbone("wardround:resnet4", pretrained=False, seed=seed).blocks[0][0].weight

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weight(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(first, weight(0))
    assert not torch.equal(first, weight(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "names no source: write timm:resnet18 or torchvision:resnet18"),
        ("tim:resnet18", r"did you mean 'timm'\?"),
        ("timm:tf_eficientnet_lite0", "nearest: timm:tf_efficientnet_lite0"),
        ("timm:resnet18.a1_in1", "nearest: timm:resnet18.a1_in1k"),
        ("torchvision:efficientnet_b00", "nearest: torchvision:efficientnet_b0"),
        ("wardround:resnet", "nearest: wardround:resnet4"),
        ("torchvision:squeezenet1_0", "cannot be cut .*convnext, densenet, efficientnet, resnet, vit"),
        ("timm:ghostnet_050", "cannot be cut .*convnext, densenet, efficientnet, resnet, vit"),
    ],
)
def test_wrong_names_are_explained(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_backbone(name, pretrained=False, seed=0)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:vit_b_16"])
def test_transformers_name_the_sizes_that_fit(name: str) -> None:
    with pytest.raises(InputError, match=r"divisible by 16, found 200 \(nearest: 192 or 208\)"):
        load_backbone(name, pretrained=False, image_size=200, seed=0)


def test_small_images_are_refused_by_the_cnn() -> None:
    with pytest.raises(InputError, match="at least 16 pixels, found 12"):
        load_backbone("wardround:cnn", pretrained=False, image_size=12, seed=0)


def test_importing_options_and_catalogue_costs_no_torch() -> None:
    """The command line lists backbones without importing torch."""
    code = "import sys, wardround.models.options, wardround.models.catalogue; assert 'torch' not in sys.modules"
    source = str(Path(__file__).parents[1] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})
