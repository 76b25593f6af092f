"""Caption fusion against plain NumPy, the null caption, masks, and the pooling that takes captions in."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wardround import seeds
from wardround.federation.rules import Owner, Rules
from wardround.models.backbones import load_backbone
from wardround.models.caption_fusion import CaptionBatch, CaptionedPool, CaptionFusion, image_tokens
from wardround.models.classifier import Classifier

WIDTH, HEADS, TEXT = 8, 2, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fusion(dropout: float = 0.0) -> CaptionFusion:
    torch.manual_seed(0)
    made = CaptionFusion(WIDTH, HEADS, dropout)
    for parameter in made.parameters():  # biases start at 0, the norm's scale at 1: nothing would show
        nn.init.normal_(parameter)
    return made.eval()


LENGTHS = (3, 0, 1)


def captions(lengths: tuple[int, ...] = LENGTHS, says: list[int] | None = None) -> CaptionBatch:
    """Captions of so many tokens; none for 0."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = drawn(len(lengths), max(lengths), TEXT, seed=1) * mask[..., None]
    return CaptionBatch(tokens, mask, torch.tensor(says or [n if length else -1 for n, length in enumerate(lengths)]))


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(z - z.max()) / np.exp(z - z.max()).sum()


def by_hand(made: CaptionFusion, image: Tensor, caption: Tensor, lengths: tuple[int, ...]) -> NDArray[np.float64]:
    """Image by image, token by token, head by head, in float64."""
    state = {name: tensor.double().numpy() for name, tensor in made.state_dict().items()}
    (w_q, w_k, w_v), (b_q, b_k, b_v) = (np.split(state[f"attention.in_proj_{kind}"], 3) for kind in ("weight", "bias"))
    rows = []
    for x, c, length in zip(image.double().numpy(), caption.double().numpy(), lengths, strict=True):
        answers = c[:length] if length else state["null"][None]
        tokens = []
        for token in x:
            q, parts = w_q @ token + b_q, []
            for head in np.split(np.arange(WIDTH), HEADS):
                k, v = answers @ w_k[head].T + b_k[head], answers @ w_v[head].T + b_v[head]
                parts.append(softmax(k @ q[head] / np.sqrt(WIDTH / HEADS)) @ v)
            y = token + state["attention.out_proj.weight"] @ np.concatenate(parts) + state["attention.out_proj.bias"]
            y = (y - y.mean()) / np.sqrt(y.var() + 1e-5)
            tokens.append(state["norm.weight"] * y + state["norm.bias"])
        rows.append(np.mean(tokens, axis=0))
    return np.stack(rows)


# Fusion.


def test_fusion_by_hand_with_long_short_and_no_captions() -> None:
    made, image, caption = fusion(), drawn(3, 5, WIDTH), drawn(3, 3, WIDTH, seed=2)
    with torch.no_grad():
        found = made(image, caption, captions().mask)
    np.testing.assert_allclose(found.numpy(), by_hand(made, image, caption, LENGTHS), rtol=1e-4, atol=1e-5)


def test_padding_says_nothing() -> None:
    made, image, caption, mask = fusion(), drawn(3, 5, WIDTH), drawn(3, 3, WIDTH, seed=2), captions().mask
    other = torch.where(mask[..., None], caption, 100.0)
    longer = torch.cat([other, drawn(3, 2, WIDTH)], 1), torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], 1)
    with torch.no_grad():
        torch.testing.assert_close(made(image, *longer), made(image, caption, mask))


def test_without_captions_every_image_attends_to_the_null_caption() -> None:
    made, image = fusion(), drawn(3, 5, WIDTH)
    nothing = torch.zeros(3, 0, dtype=torch.bool)
    with torch.no_grad():
        alone = made(image)
        np.testing.assert_allclose(alone.numpy(), by_hand(made, image, image, (0, 0, 0)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made(image, torch.zeros(3, 0, WIDTH), nothing), alone)
        torch.testing.assert_close(made(image, drawn(3, 3, WIDTH), captions().mask)[1], alone[1])


def test_the_null_caption_learns_from_images_without_one_alone() -> None:
    made, image, caption = fusion(), drawn(3, 5, WIDTH), drawn(3, 3, WIDTH, seed=2).requires_grad_()
    made(image, caption, captions().mask)[[0, 2]].square().sum().backward()
    assert made.null.grad is not None
    assert caption.grad is not None
    assert not made.null.grad.any()
    assert caption.grad.abs().sum(2).tolist()[1] == [0, 0, 0]
    assert ((caption.grad.abs().sum(2) > 0) == captions().mask).all()
    made(image, caption, captions().mask)[1].square().sum().backward()
    assert made.null.grad.any()


def test_captions_are_hidden_in_training_alone_from_the_global_stream() -> None:
    made, image, caption = fusion(dropout=0.3), drawn(400, 2, WIDTH), drawn(400, 3, WIDTH, seed=2)
    mask = torch.ones(400, 3, dtype=torch.bool)
    with torch.no_grad():
        whole, alone = made(image, caption, mask), made(image)
        made.train()
        with seeds.torch_scope(0, "dropout"):
            first = made(image, caption, mask)
        with seeds.torch_scope(0, "dropout"):
            assert torch.equal(made(image, caption, mask), first)
    hidden = torch.isclose(first, alone, atol=1e-6).all(1)
    assert torch.isclose(first, whole, atol=1e-6).all(1)[~hidden].all()
    assert 400 * 0.3 - 4 * 9.2 < int(hidden.sum()) < 400 * 0.3 + 4 * 9.2  # four standard deviations
    with torch.no_grad():
        made.dropout = 1.0
        torch.testing.assert_close(made(image, caption, mask), alone)


def test_the_published_fusion_has_two_heads_of_256() -> None:
    made = CaptionFusion()
    assert (made.attention.num_heads, made.attention.embed_dim, made.dropout) == (2, 256, 0.3)
    assert sum(p.numel() for p in made.parameters()) == 256 + 4 * (256 * 256 + 256) + 2 * 256


# Batches of captions.


def test_sentences_are_means_over_tokens() -> None:
    batch = captions()
    expected = torch.stack([batch.tokens[0].mean(0), torch.zeros(TEXT), batch.tokens[2, 0]])
    torch.testing.assert_close(batch.sentences(), expected)


def test_a_batch_is_split_as_tensors_are() -> None:
    batch = captions((3, 0, 1, 2, 2))
    parts = batch.split(2)
    assert [part.says.tolist() for part in parts] == [[0, -1, 2], [3, 4]]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(parts[1].mask, batch.mask[3:])
    assert batch.to(None) is batch
    assert torch.equal(batch.to(torch.device("cpu")).tokens, batch.tokens)


# Image tokens.


def mean(h: Tensor) -> Tensor:
    return h.flatten(2).mean(2)


class Mean(nn.Module):
    """A pooling of feature maps `(B, C, H, W)`."""

    def forward(self, h: Tensor) -> Tensor:
        """Their mean."""
        return mean(h)


def test_tokens_of_maps_in_both_layouts_of_transformers_and_of_pooled_features() -> None:
    maps = drawn(2, 5, 3, 4)
    tokens = image_tokens(maps, Mean(), 5)
    assert tokens.shape == (2, 12, 5)
    assert torch.equal(tokens[1, 7], maps[1, :, 1, 3])
    assert torch.equal(image_tokens(maps.permute(0, 2, 3, 1), Mean(), 5), tokens)
    assert torch.equal(image_tokens(tokens, Mean(), 5), tokens)
    pooled = drawn(2, 5)
    assert torch.equal(image_tokens(pooled, nn.Identity(), 5), pooled[:, None])
    flat = image_tokens(maps, nn.Flatten(1), 60)
    assert torch.equal(flat, maps.flatten(1)[:, None])


# The pooling that takes captions in.


def pool(fused: bool = True, dropout: float = 0.0) -> CaptionedPool:
    torch.manual_seed(1)
    made = CaptionedPool(Mean(), 5, TEXT, fusion(dropout) if fused else None, WIDTH)
    return made.eval()


def test_with_fusion_features_are_fused_and_both_projections_are_heard() -> None:
    made, maps, batch = pool(), drawn(3, 5, 2, 2), captions()
    with torch.no_grad():
        with made.listening(batch) as heard:
            found = made(maps)
        assert heard is not None
        assert heard.image is not None
        assert heard.caption is not None
        assert made.fusion is not None
        tokens = made.image(maps.flatten(2).transpose(1, 2))
        torch.testing.assert_close(found, made.fusion(tokens, made.text(batch.tokens), batch.mask))
        torch.testing.assert_close(heard.image, made.image(mean(maps)))
        torch.testing.assert_close(heard.caption, made.text(batch.sentences()))
        torch.testing.assert_close(made(maps), made.fusion(tokens))
    assert made.out_features == WIDTH


def test_without_fusion_features_are_what_they_were_and_captions_do_not_touch_them() -> None:
    made, maps, batch = pool(fused=False), drawn(3, 5, 2, 2), captions()
    with made.listening(batch) as heard:
        found = made(maps)
    assert torch.equal(found, mean(maps))
    assert made.out_features == 5
    assert heard is not None
    assert heard.image is not None
    torch.testing.assert_close(heard.image, made.image(mean(maps)))
    assert not any(name.startswith("fusion") for name in made.state_dict())


def test_captions_are_gone_after_the_block_whatever_happens() -> None:
    made, maps = pool(), drawn(3, 5, 2, 2)
    with torch.no_grad():
        alone = made(maps)
        with pytest.raises(ValueError, match="captions of 3 images for 2 images"), made.listening(captions()):
            made(maps[:2])
        assert torch.equal(made(maps), alone)
        with made.listening(captions()), made.listening(None) as heard:
            assert heard is None
            assert torch.equal(made(maps), alone)
        with made.listening(captions()):
            twin = copy.deepcopy(made)
            assert torch.equal(twin(maps), alone)
            assert not torch.equal(made(maps), alone)


def test_within_a_classifier_captions_reach_logits_and_only_where_they_are_given() -> None:
    """Hidden captions are the same as none, and what stays at a client is P_t alone."""
    backbone = load_backbone("wardround:resnet4", pretrained=False, seed=0)
    model = Classifier(backbone, 4, "all")
    model.pool = CaptionedPool(backbone.pool, backbone.features, TEXT, fusion(), WIDTH)
    model.head = nn.Linear(WIDTH, 4)
    model.eval()
    h = drawn(3, 3, 32, 32)
    with torch.no_grad():
        alone = model(h)
        with model.pool.listening(captions()):
            told = model(h)
        assert torch.equal(model(h), alone)
    assert torch.isclose(told, alone).all(1).tolist() == [False, True, False]
    rules = Rules.of(model).local(model.pool.text)
    assert rules.names(Owner.LOCAL) == ("pool.text.weight", "pool.text.bias")
    assert {name for name in rules.names(Owner.SHARED) if name.startswith("pool.")} == {
        "pool.image.weight",
        "pool.image.bias",
        "pool.fusion.null",
        "pool.fusion.attention.in_proj_weight",
        "pool.fusion.attention.in_proj_bias",
        "pool.fusion.attention.out_proj.weight",
        "pool.fusion.attention.out_proj.bias",
        "pool.fusion.norm.weight",
        "pool.fusion.norm.bias",
    }
