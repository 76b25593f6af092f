"""The adapter and the head of cosines that any method may train on, and what goes without them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from wardround.errors import InputError
from wardround.federation.rules import Owner
from wardround.methods.dbe import DBE
from wardround.methods.fedclip import FedCLIP
from wardround.methods.fedprox import FedProx
from wardround.methods.moon import MOON
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.models.text_head import AttentionAdapter, CosineHead

pytest.importorskip("sentence_transformers", reason="the extra [clip] is not installed")

ENCODER = {"backbone": "bridge:lite0-minilm", "finetune_blocks": 0, "dropout": 0.0}


def encoder(seed: int = 0, **options: object) -> Classifier:
    return build_classifier(ModelOptions(**(ENCODER | options)), ("mole", "cyst", "scar"), 3, 64, seed)  # type: ignore[arg-type]


def test_the_head_is_the_scaled_cosine_with_the_prompts() -> None:
    model = encoder(classifier="text")
    features = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    expected = model.prompts.scale * functional.cosine_similarity(features[:, None], model.head.weight[None], dim=2)
    torch.testing.assert_close(model(features), expected, rtol=1e-4, atol=1e-4)
    assert not [name for name, _ in model.named_parameters() if name.startswith(("head.", "neck."))]


def test_the_adapter_has_the_published_size_and_formula() -> None:
    model = encoder(classifier="text", adapter="attention")
    assert sum(p.numel() for p in model.neck.parameters()) == 525_312
    features = torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    first, _, second = model.neck.layers
    attention = torch.softmax(second(torch.tanh(first(features))), 1)
    torch.testing.assert_close(model.features(features), functional.normalize(attention * features, dim=1))


def test_the_adapter_is_shared_and_goes_before_a_linear_head_too() -> None:
    model = encoder(adapter="attention")
    assert isinstance(model.neck, AttentionAdapter)
    rules = FedProx().rules(model)
    assert {name for name in rules.names(Owner.SHARED) if name.startswith("neck.")}
    assert not isinstance(model.head, CosineHead)
    assert rules.names(Owner.LOCAL) == ("head.weight", "head.bias")


def test_the_same_seed_gives_the_same_adapter_and_the_adapter_changes_no_other_weight() -> None:
    one, two, other = encoder(adapter="attention"), encoder(adapter="attention"), encoder(1, adapter="attention")
    first, again, else_ = (model.neck.layers[0].weight for model in (one, two, other))
    assert torch.equal(first, again)
    assert not torch.equal(first, else_)
    assert torch.equal(one.head.weight, encoder().head.weight)


def test_a_network_without_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"model.classifier = \"text\".*no text side"):
        build_classifier(
            ModelOptions(backbone="wardround:resnet4-lib", pretrained=False, finetune_blocks=0, classifier="text"),
            ("a", "b"), 3, 32, 0,
        )  # fmt: skip


@pytest.mark.parametrize("method", [FedCLIP(), MOON(), DBE()])
def test_methods_that_bring_their_own_say_so(method: FedCLIP | MOON | DBE) -> None:
    with pytest.raises(InputError, match=r"model.adapter, model.classifier: .* brings what follows the features"):
        method.edit(encoder(adapter="attention"), 64)


def test_moon_contrasts_the_adapted_features_without_its_own_projection() -> None:
    model = encoder(classifier="text", adapter="attention")
    MOON(projection=0).edit(model, 64)
    assert isinstance(model.neck, AttentionAdapter)
