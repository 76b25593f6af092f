"""FedLoRA: attention with low-rank changes against the frozen one, what travels, and both averages by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.federation.messages import Message, named
from wardround.federation.rules import Owner, modules_of_type
from wardround.federation.server import Reply, Server
from wardround.methods.base import ServerSide
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.fedclip import CLIPZeroShot
from wardround.methods.fedlora import FedLoRA
from wardround.methods.trial import Network, Trial
from wardround.models.low_rank import LowRank, LowRankAttention, form_of, mean_pair, pair_names
from wardround.training.local import only_training

VIT = Network("wardround:vit-tiny", 16, 2, dropout=0.0, text=True)
"""A transformer of width 64 with a text side; two of its five blocks are tuned."""
KINDS = ("torch", "torch, tokens first", "timm")
PAIR = ("attn.q.A", "attn.q.B")
WIDTH, LAYERS = 32, 2
CLIP: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": LAYERS, "width": WIDTH, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture
def clip(tmp_path: Path) -> Network:
    """CLIP with few and narrow layers, all of it tuned."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    (tmp_path / "config.json").write_text(json.dumps(CLIP))
    return Network(f"open_clip:{tmp_path / 'config.json'}", 32, "all", dropout=0.0, text=True)


def kinds() -> dict[str, tuple[nn.Module, int]]:
    """Attention of width 8 as three libraries write it, and how many times it takes the tokens."""
    from timm.layers import Attention

    torch.manual_seed(0)
    return {
        "torch": (nn.MultiheadAttention(8, 2, batch_first=True), 3),
        "torch, tokens first": (nn.MultiheadAttention(8, 2), 3),
        "timm": (Attention(8, num_heads=2, qkv_bias=True), 1),
    }


def outputs(module: nn.Module, times: int, x: Tensor) -> Tensor:
    found = module(*[x] * times)
    return found[0] if isinstance(found, tuple) else found


def tokens() -> Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def fill(module: nn.Module, seed: int = 2) -> None:
    """Give every B values."""
    stream = torch.Generator().manual_seed(seed)
    for pair in modules_of_type(module, (LowRank,)):
        nn.init.normal_(pair.B, generator=stream)  # type: ignore[arg-type]


# ---- layers


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_b_at_zero_is_the_pretrained_one(kind: str) -> None:
    """To the bit: with gradients, and in evaluation without them, where torch has fast paths."""
    base, times = kinds()[kind]
    adapted, x = LowRankAttention(base, 3, 2.0), tokens()
    for mode in (True, False):
        base.train(mode)
        adapted.train(mode)
        assert torch.equal(outputs(adapted, times, x), outputs(base, times, x))
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert torch.equal(outputs(adapted, times, x), outputs(base, times, x))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_runs_on_its_weights_plus_the_scaled_products(kind: str) -> None:
    """The rows of q, k and v by NumPy."""
    base, times = kinds()[kind]
    adapted, x = LowRankAttention(base, 2, 0.5), tokens()
    fill(adapted)
    pairs = {name: (p.B.detach().numpy(), p.A.detach().numpy()) for name, p in adapted.pairs.items()}
    joint, output = (base.get_parameter(name) for name in form_of(base) or ())
    expected = joint.detach().numpy().copy()
    for start, name in enumerate("qkv"):
        b, a = pairs[name]
        expected[8 * start : 8 * start + 8] += 0.5 * b @ a
    with torch.no_grad():
        found = outputs(adapted, times, x)
        before = outputs(base, times, x)
        joint.copy_(torch.from_numpy(expected))
        output += 0.5 * torch.from_numpy(pairs["o"][0] @ pairs["o"][1])
        torch.testing.assert_close(found, outputs(base, times, x))
    assert not torch.allclose(found, before)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_has_to_be_merged_for_evaluation(kind: str) -> None:
    """Without dropout, training and evaluation give the same, with and without gradients."""
    base, times = kinds()[kind]
    adapted, x = LowRankAttention(base, 2, 0.5), tokens()
    fill(adapted)
    trained = outputs(adapted.train(), times, x)
    torch.testing.assert_close(outputs(adapted.eval(), times, x), trained)
    with torch.inference_mode():
        torch.testing.assert_close(outputs(adapted, times, x), trained)


def test_masks_go_through() -> None:
    """What a token may not see does not change it."""
    base = kinds()["torch"][0]
    adapted, x = LowRankAttention(base, 2, 0.5).eval(), tokens()
    fill(adapted)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    other = x.clone()
    other[:, 4] += 1
    one, two = (adapted(y, y, y, need_weights=False, attn_mask=mask)[0] for y in (x, other))
    torch.testing.assert_close(one[:, :4], two[:, :4])
    assert not torch.allclose(one[:, 4], two[:, 4])


def test_a_reaches_its_gradient_with_the_first_step_of_b() -> None:
    """dL/dA = s B^T G is 0 at B = 0, dL/dB = s G A^T is not."""
    adapted, x = LowRankAttention(kinds()["timm"][0], 2, 0.5), tokens()
    adapted.base.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.1)
    largest = []
    for _ in range(2):
        optimizer.zero_grad()
        adapted(x).square().sum().backward()
        pairs = list(adapted.pairs.values())
        largest.append([(float(p.A.grad.abs().max()), float(p.B.grad.abs().max())) for p in pairs])
        optimizer.step()
    assert all(a == 0 and b > 0 for a, b in largest[0])
    assert all(a > 0 and b > 0 for a, b in largest[1])
    assert not any(parameter.grad is not None for parameter in adapted.base.parameters())


def test_a_starts_kaiming_uniform() -> None:
    """With a = sqrt 5: uniform in plus and minus 1 / sqrt(inputs)."""
    torch.manual_seed(0)
    pair = LowRank(400, 100, 8)
    assert not pair.B.any()
    assert 0.99 * 400**-0.5 < float(pair.A.detach().abs().max()) <= 400**-0.5
    assert float(pair.A.detach().std()) == pytest.approx((3 * 400) ** -0.5, rel=0.05)


def test_what_is_no_attention_is_left_alone() -> None:
    assert form_of(nn.MultiheadAttention(8, 2, kdim=4, vdim=4)) is None
    assert form_of(nn.Linear(8, 24)) is None


# ---- the mean of products


def states(*pairs: tuple[Any, Any]) -> list[dict[str, Tensor]]:
    """Of clients, from their B and A."""
    return [dict(zip(PAIR, (torch.tensor(a), torch.tensor(b)), strict=True)) for b, a in pairs]


def test_the_best_pair_of_rank_1_by_hand() -> None:
    """M = (diag(2, 0) + diag(0, 1)) / 2 = diag(1, 1/2)."""
    clients = states(([[2.0], [0.0]], [[1.0, 0.0]]), ([[0.0], [1.0]], [[0.0, 1.0]]))
    pair, left, whole = mean_pair(clients, [0.5, 0.5], PAIR)
    torch.testing.assert_close(pair[PAIR[0]], torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(pair[PAIR[1]], torch.tensor([[1.0], [0.0]]))
    assert (left, whole) == (pytest.approx(0.25), pytest.approx(1.25))


def random_clients(count: int, rank: int = 2, outputs: int = 7, inputs: int = 5) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(count)
    return states(
        *(
            (rng.normal(size=(outputs, rank)).astype(np.float32), rng.normal(size=(rank, inputs)).astype(np.float32))
            for _ in range(count)
        )
    )


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_best_pair_by_numpy(count: int) -> None:
    """One client's own product, fewer and more columns than the matrix has."""
    clients, shares = random_clients(count), np.arange(1, count + 1) / np.arange(1, count + 1).sum()
    m = sum(p * c[PAIR[1]].numpy() @ c[PAIR[0]].numpy() for p, c in zip(shares, clients, strict=True))
    u, s, vt = np.linalg.svd(m)
    pair, left, whole = mean_pair(clients, list(shares), PAIR)
    np.testing.assert_allclose(pair[PAIR[1]] @ pair[PAIR[0]], u[:, :2] * s[:2] @ vt[:2], atol=1e-5)
    np.testing.assert_allclose(pair[PAIR[0]] @ pair[PAIR[0]].T, np.eye(2), atol=1e-5)
    assert left == pytest.approx((s[2:] ** 2).sum(), abs=1e-5)
    assert whole == pytest.approx((m**2).sum(), rel=1e-5)


def test_a_mean_of_the_rank_is_reproduced() -> None:
    """Clients whose A span the same rows: the mean product has their rank."""
    clients = random_clients(3)
    turn = torch.tensor([[2.0, 1.0], [0.5, 1.0]])
    clients[1][PAIR[0]], clients[2][PAIR[0]] = turn @ clients[0][PAIR[0]], -clients[0][PAIR[0]]
    mean = torch.stack([client[PAIR[1]] @ client[PAIR[0]] for client in clients]).mean(0)
    pair, left, _ = mean_pair(clients, [1 / 3] * 3, PAIR)
    torch.testing.assert_close(pair[PAIR[1]] @ pair[PAIR[0]], mean, rtol=1e-5, atol=1e-5)
    assert left == pytest.approx(0, abs=1e-10)


def test_b_can_learn_on_from_a_mean_of_zero() -> None:
    clients = random_clients(2)
    for client in clients:
        client[PAIR[1]] = torch.zeros(7, 2)
    pair, left, whole = mean_pair(clients, [0.5, 0.5], PAIR)
    assert (left, whole) == (0, 0)
    assert not pair[PAIR[1]].any()
    torch.testing.assert_close(pair[PAIR[0]].norm(dim=1), torch.ones(2))


# ---- averages


def combined(method: FedLoRA, clients: list[dict[str, Tensor]], examples: tuple[int, ...] = (1, 1)) -> Server:
    replies = [
        Reply(f"client {i}", Message(named("state", state), {"examples": count}))
        for i, (state, count) in enumerate(zip(clients, examples, strict=True))
    ]
    server = Server({name: torch.full_like(tensor, 9.0) for name, tensor in clients[0].items()})
    method.combine(server, "train", iter(replies))
    return server


TWO = ([[2.0], [0.0]], [[1.0, 0.0]]), ([[0.0], [1.0]], [[0.0, 1.0]])


def product(state: Mapping[str, Tensor]) -> list[list[float]]:
    found: list[list[float]] = (state[PAIR[1]] @ state[PAIR[0]]).tolist()
    return found


def test_a_and_b_are_averaged_and_their_product_is_biased() -> None:
    """The mean product of these two clients is diag(1, 1/2); A and B averaged apart are far from it."""
    server = combined(FedLoRA(), states(*TWO))
    assert server.state[PAIR[0]].tolist() == [[0.5, 0.5]]
    assert server.state[PAIR[1]].tolist() == [[1.0], [0.5]]
    assert product(server.state) == [[0.5, 0.5], [0.25, 0.25]]
    assert server.log == {}
    by_product = combined(FedLoRA(average="product_svd"), states(*TWO))
    np.testing.assert_allclose(product(by_product.state), [[1, 0], [0, 0]], atol=1e-6)
    assert by_product.log == {"product_residual": pytest.approx((0.25 / 1.25) ** 0.5)}


def test_products_are_weighed_as_everything_is() -> None:
    """3 and 1 images: M = diag(3/2, 1/4); a client without any counts for nothing."""
    method = FedLoRA(average="product_svd", weights="examples")
    server = combined(method, states(*TWO), (3, 1))
    np.testing.assert_allclose(product(server.state), [[1.5, 0], [0, 0]], atol=1e-6)
    assert server.log["product_residual"] == pytest.approx((0.0625 / (2.25 + 0.0625)) ** 0.5)
    alone = combined(FedLoRA(average="product_svd"), states(*TWO), (0, 5))
    np.testing.assert_allclose(product(alone.state), [[0, 0], [0, 1]], atol=1e-6)
    assert alone.log["product_residual"] == pytest.approx(0)
    nobody = combined(FedLoRA(average="product_svd"), states(*TWO), (0, 0))
    assert (float(nobody.state[PAIR[0]][0, 0]), nobody.log) == (9.0, {})


def test_other_shared_entries_are_averaged_beside_products() -> None:
    clients = [state | {"head.weight": torch.tensor([i])} for i, state in zip((1.0, 4.0), states(*TWO), strict=True)]
    assert combined(FedLoRA(average="product_svd"), clients).state["head.weight"].tolist() == [2.5]
    assert pair_names(clients[0]) == [PAIR]


# ---- the method


def test_the_first_prediction_is_the_frozen_encoders(clip: Network) -> None:
    """To the bit that of zero-shot; no longer once B is something."""
    method = FedLoRA()
    adapted, plain = clip.model(method).eval(), replace(clip, finetune_blocks=0).model(CLIPZeroShot()).eval()
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = plain.logits_of_images(images)
        assert torch.equal(adapted.logits_of_images(images), expected)
        fill(adapted)
        assert not torch.allclose(adapted.logits_of_images(images), expected)
    # Fast paths of evaluation are not those of training.
    with only_training(adapted, adapted.tuned.parameters()):
        trained = adapted.logits_of_images(images).detach()
    torch.testing.assert_close(adapted.logits_of_images(images).detach(), trained, rtol=1e-4, atol=1e-4)


def test_a_and_b_alone_train_and_travel(clip: Network) -> None:
    """r (in + out) numbers a matrix, four matrices a layer, and nothing besides in any message."""
    method = FedLoRA(rank=3)
    trial = Trial(method, clip).run(2)
    count = LAYERS * 4 * 3 * (WIDTH + WIDTH)
    assert trial.side.shared_elements == count == 1536
    assert sum(p.numel() for p in trial.model.parameters() if p.requires_grad) == count
    wanted = {
        f"tuned.0.visual.transformer.resblocks.{layer}.attn.pairs.{name}.{part}"
        for layer in (0, 1)
        for name in "qkvo"
        for part in "AB"
    }
    rules = method.rules(trial.model)
    assert set(rules.names(Owner.SHARED)) == wanted
    assert not rules.names(Owner.LOCAL)
    assert len(wanted) == 16
    for visit in trial.visits():
        assert visit.up.tensors.keys() == visit.down.tensors.keys() == {f"state/{name}" for name in wanted}
        assert visit.changed <= wanted
    overhead = len(trial.visits("large")[0].frame) - 4 * count
    assert 0 < overhead < 200 * len(wanted)  # names and shapes


def test_the_size_in_clip_vit_b_32() -> None:
    """Twelve layers of width 768 and rank 3: 221,184 numbers."""
    with torch.device("meta"):
        layer = LowRankAttention(nn.MultiheadAttention(768, 12, batch_first=True), 3, 1.0)
    assert 12 * sum(p.numel() for p in layer.pairs.parameters()) == 12 * 4 * 3 * (768 + 768) == 221_184


def test_the_frozen_blocks_can_still_be_kept() -> None:
    model = VIT.model(FedLoRA())
    assert len(model.frozen) == 3
    assert not modules_of_type(model.frozen, (LowRankAttention,))
    assert [len(modules_of_type(block, (LowRankAttention,))) for block in model.tuned] == [1, 1]


@pytest.mark.parametrize("average", ["AB", "product_svd"])
def test_it_conforms_with_a_text_side(average: str) -> None:
    outcome = check_method(FedLoRA(average=average), VIT)  # type: ignore[arg-type]
    reasons = {text.removeprefix("not applicable: ") for text in outcome.values() if text != PASSED}
    assert reasons <= {"nothing is local", "the method aggregates in its own way", "nothing that is shared is averaged"}
    assert outcome["wire"] == outcome["determinism"] == outcome["training"] == PASSED


def test_it_conforms_on_clip(clip: Network) -> None:
    outcome = check_method(FedLoRA(), clip, rounds=2)
    assert outcome["frozen"] == outcome["wire"] == outcome["training"] == outcome["prediction"] == PASSED


@pytest.mark.parametrize("head", ["local", "shared"])
def test_without_a_text_side_there_is_a_linear_head(head: Any) -> None:
    """And the task loss."""
    network = replace(VIT, text=False, head=head)
    outcome = check_method(FedLoRA(), network)
    assert outcome["wire"] == outcome["training"] == outcome["persistence" if head == "local" else "frozen"] == PASSED
    side = ServerSide(FedLoRA(), network.model(FedLoRA()), network.image_size)
    others = {name for name in side.initial_state if not name.endswith((".A", ".B"))}
    assert others == ({"head.weight", "head.bias"} if head == "shared" else set())


def test_rounds_bring_the_loss_down() -> None:
    trial = Trial(FedLoRA(contrastive="none", alpha=6.0), VIT, ["large", "small"], lr=0.05, local_epochs=2).run(6)
    losses = [visit.up.scalars["loss"] for visit in trial.visits("large")]
    assert losses[-1] < 0.9 * losses[0]


def test_the_residual_is_logged() -> None:
    trial = Trial(FedLoRA(average="product_svd"), VIT, ["large", "small"]).run(2)
    assert all(0 < log["product_residual"] < 1 for log in trial.history.logs)


@pytest.mark.parametrize(
    ("method", "network", "said"),
    [
        (FedLoRA(), NETWORKS["encoder"], r"finetune_blocks = 0 leaves fedlora nothing to adapt"),
        (
            FedLoRA(),
            NETWORKS["bn-cnn"],
            r"'wardround:cnn-bn' has no attention .* take a transformer such as open_clip:",
        ),
        (FedLoRA(rank=65), VIT, r"method.rank = 65: .* width 64 \(allowed: 1 to 64\)"),
        (FedLoRA(contrastive="instance"), replace(VIT, text=False), r'contrastive = "instance": .* has no text side'),
    ],
)
def test_networks_that_will_not_do(method: FedLoRA, network: Network, said: str) -> None:
    with pytest.raises(InputError, match=said):
        network.model(method)
