"""The classifier: what is frozen stays, what travels is counted, h is all that the tuned part needs."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.models.backbones import load_backbone
from wardround.models.classifier import Classifier, build_classifier, in_eval_mode
from wardround.models.options import ModelOptions


def options(**values: Any) -> ModelOptions:
    return ModelOptions(**({"backbone": "wardround:cnn-bn", "pretrained": False, "dropout": 0.0} | values))


def small(**values: Any) -> Classifier:
    """A CNN with BatchNorm in its first two blocks, for 3x28x28 and four classes."""
    return build_classifier(options(**values), classes=4, channels=3, image_size=28, seed=0)


def images(count: int = 6, size: int = 28) -> Tensor:
    return torch.randint(0, 256, (count, size, size, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def steps(model: Classifier, count: int = 3) -> None:
    """A few steps of plain SGD in training mode."""
    model.train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(count):
        optimiser.zero_grad()
        functional.cross_entropy(model.logits_of_images(images()), torch.arange(6) % 4).backward()
        optimiser.step()


@lru_cache
def b0() -> Classifier:
    """EfficientNet-B0 with features[6..8] tuned: the network of PAFP."""
    backbone = load_backbone("torchvision:efficientnet_b0", pretrained=False, seed=0)
    return Classifier(backbone, 8, 2)


def test_shared_elements_of_pafp() -> None:
    """3,155,740 parameters, 25,856 running moments and 16 batch counters."""
    state = b0().tuned.state_dict()
    assert sum(value.numel() for value in state.values()) == 3_181_612
    assert sum(p.numel() for p in b0().tuned.parameters()) == 3_155_740
    assert sum(name.endswith("num_batches_tracked") for name in state) == 16
    assert sum(p.numel() for p in b0().head.parameters()) == 10_248


@pytest.mark.parametrize(
    ("size", "shapes", "moments"),
    [(200, [(112, 13, 13), (192, 7, 7)], 56_672), (224, [(112, 14, 14), (192, 7, 7)], 62_720)],
)
def test_alignment_sites_of_pafp(size: int, shapes: list[tuple[int, ...]], moments: int) -> None:
    found = b0().site_shapes(size)
    assert found == shapes
    assert 2 * sum(c * h * w for c, h, w in found) == moments


def test_default_backbone_is_cut_like_pafp() -> None:
    model = build_classifier(ModelOptions(pretrained=False), 4, 3, 64, seed=0)
    assert model.name == "timm:tf_efficientnet_lite0"
    assert (len(model.frozen), len(model.tuned), model.dropout.p) == (6, 2, 0.2)
    assert [shape[0] for shape in model.site_shapes(64)] == [112, 192]


def test_frozen_blocks_do_not_move() -> None:
    """Neither weights nor BatchNorm buffers, bit for bit, while the tuned ones do."""
    model = small(finetune_blocks=2)
    before = copy.deepcopy(model.state_dict())
    steps(model)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith("frozen.") for name in moved)
    assert {name for name in before if not name.startswith("frozen.")} == moved


def test_frozen_blocks_stay_in_eval_mode_however_they_are_asked() -> None:
    model = small(finetune_blocks=2)
    for ask in (model.train, model.frozen.train, nn.Sequential(model).train):
        ask()
        assert not any(module.training for module in model.frozen.modules())
    assert model.tuned.training
    assert not any(p.requires_grad for p in model.frozen.parameters())


def test_depth_zero_trains_the_head_alone() -> None:
    model = small(finetune_blocks=0)
    assert (len(model.frozen), len(model.tuned), len(model.before)) == (3, 0, 0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    assert model.site_shapes(28) == []
    assert model.prefix(model.prepare(images())).shape == (6, 512)


@pytest.mark.parametrize("depth", [3, "all"])
def test_depth_all_freezes_nothing(depth: Any) -> None:
    model = small(finetune_blocks=depth)
    assert len(model.frozen) == 0
    assert all(p.requires_grad for p in model.parameters())
    x = model.prepare(images())
    assert torch.equal(model.prefix(x), x)
    assert model.site_shapes(28) == [(3, 28, 28), (32, 12, 12), (64, 4, 4)]


@pytest.mark.parametrize("depth", [4, -1])
def test_depths_beyond_the_backbone_are_refused(depth: int) -> None:
    backbone = load_backbone("wardround:cnn", pretrained=False, image_size=28, seed=0)
    with pytest.raises(InputError, match=rf'finetune_blocks = {depth}: .*cnn\' has 3 blocks .*0 to 3, or "all"'):
        Classifier(backbone, 4, depth)


def test_h_is_all_that_the_tuned_part_needs() -> None:
    model = small(finetune_blocks=1).eval()
    h = model.prefix(model.prepare(images()))
    assert not h.requires_grad
    logits = model(h)
    assert logits.shape == (6, 4)
    assert torch.equal(logits, model.logits_of_images(images()))
    assert torch.equal(logits, model.classify(model.features(h)))
    whole = load_backbone("wardround:cnn-bn", pretrained=False, image_size=28, seed=0).eval()
    torch.testing.assert_close(model.features(h), whole(whole.normalise(images())))


def test_before_runs_before_its_block() -> None:
    model = small(finetune_blocks=2).eval()
    h = torch.rand(2, 32, 12, 12)
    expected = model.tuned[1](2 * model.tuned[0](h))
    model.before[1] = nn.Sequential(Scale())
    assert torch.equal(model.features(h), expected)


class Scale(nn.Module):
    """Twice the input."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_dropout_is_the_backbones_own_unless_given() -> None:
    backbone = load_backbone("torchvision:efficientnet_b0", pretrained=False, seed=0)
    assert Classifier(backbone, 2, 0).dropout.p == 0.2
    assert Classifier(backbone, 2, 0, dropout=0.5).dropout.p == 0.5


def test_state_names() -> None:
    model = small(finetune_blocks=1, logit_corrector="affine")
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    convolutions = [
        f"frozen.{block}.{entry}"
        for block in (0, 1)
        for entry in ["0.weight", "0.bias", *(f"1.{name}" for name in norm)]
    ]
    rest = ["tuned.0.1.weight", "tuned.0.1.bias", "head.weight", "head.bias", "corrector.scale", "corrector.bias"]
    assert list(model.state_dict()) == convolutions + rest


def test_names_of_the_closing_convolution() -> None:
    names = [name for name in b0().state_dict() if name.startswith("tuned.1.closing")]
    assert names[:2] == ["tuned.1.closing.0.weight", "tuned.1.closing.1.weight"]


def test_site_shapes_leave_the_model_alone() -> None:
    model = small(finetune_blocks=2).train()
    model.tuned[0].eval()
    before = copy.deepcopy(model.state_dict())
    model.site_shapes(28)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, model.tuned[0].training, model.tuned[1].training) == (True, False, True)


def test_eval_mode_is_left_after_an_error() -> None:
    model = small().train()
    modes = []

    def fail() -> None:
        with in_eval_mode(model):
            modes.append(model.tuned.training)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert modes == [False]
    assert model.tuned.training


def test_channels_last_gives_the_same_logits() -> None:
    model = build_classifier(ModelOptions(backbone="torchvision:resnet18", pretrained=False), 4, 3, 64, seed=0).eval()
    expected = model.logits_of_images(images(size=64))
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model.logits_of_images(images(size=64)), expected, rtol=1e-4, atol=1e-5)
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes


def test_the_seed_decides_backbone_and_head_separately() -> None:
    first, again, other = (build_classifier(options(), 4, 3, 28, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    deeper = build_classifier(options(finetune_blocks="all"), 4, 3, 28, seed=0)
    assert torch.equal(deeper.head.weight, first["head.weight"])


def test_grey_images_pass_a_colour_backbone() -> None:
    model = build_classifier(options(backbone="wardround:resnet4"), 4, 1, 28, seed=0).eval()
    grey = images()[..., :1]
    assert torch.equal(model.logits_of_images(grey), model.logits_of_images(grey.expand(-1, -1, -1, 3)))


@pytest.mark.parametrize(
    "values",
    [
        {"finetune_blocks": -1},
        {"finetune_blocks": "some"},
        {"head": "both"},
        {"dropout": 1.0},
        {"logit_corrector": "bias"},
        {"corrector_tau": -1},
        {"pretrained": ""},
        {"backbones": "x"},
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelOptions(**values)


def test_option_defaults() -> None:
    assert ModelOptions().model_dump() == {
        "backbone": "timm:tf_efficientnet_lite0",
        "pretrained": True,
        "finetune_blocks": 2,
        "head": "local",
        "dropout": None,
        "logit_corrector": "none",
        "corrector_tau": 1.0,
        "anchors": None,
        "classifier": "linear",
        "adapter": "none",
    }
    assert ModelOptions(pretrained="a.pth").pretrained == "a.pth"
    assert all(field.description for field in ModelOptions.model_fields.values())
