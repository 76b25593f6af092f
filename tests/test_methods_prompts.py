"""Methods that learn a prompt's context: CoCoOp and FedAPT by hand, what is averaged, and how texts are split."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.federation.messages import BadMessage, Message, named
from wardround.federation.rules import Owner
from wardround.federation.server import Server
from wardround.methods.base import Method
from wardround.methods.check import CHECKS, NETWORKS, PASSED, check_method
from wardround.methods.cocoop import CoCoOp, ConditionalPromptHead
from wardround.methods.fedapt import FedAPT
from wardround.methods.keyed_prompts import KeyedPromptHead, distinct
from wardround.methods.learned_context import encode_many
from wardround.methods.trial import MadeUpText, Trial
from wardround.models.backbones import load_backbone
from wardround.models.classifier import Classifier
from wardround.models.prompts import Prompts, TextOptions, prompts_for
from wardround.training.client import Client

NAMES = ("mole", "wart", "scar")
SCALE = 10.0
NETWORK = NETWORKS["encoder"]


class CountingText(MadeUpText):
    """Notes how many texts each pass has."""

    def __init__(self, dim: int, width: int = MadeUpText.context_width) -> None:
        self.context_width = width
        super().__init__(dim)
        self.passes: list[int] = []

    def encode_context(self, context: Tensor, names: Sequence[str]) -> Tensor:
        self.passes.append(len(names))
        return super().encode_context(context, names)


def prompts(dim: int = 5, width: int = 8) -> Prompts:
    return prompts_for(CountingText(dim, width), NAMES, TextOptions(), SCALE, seed=0)


def passes(of: Prompts) -> list[int]:
    tower = of.tower
    assert isinstance(tower, CountingText)
    return tower.passes


def images(count: int, dim: int = 5) -> Tensor:
    return 3 * torch.randn(count, dim, generator=torch.Generator().manual_seed(1))


def conditional(of: Prompts, at_once: int = 256, dim: int = 5) -> ConditionalPromptHead:
    torch.manual_seed(0)
    return ConditionalPromptHead(of, dim, 2, at_once)


def keyed(
    of: Prompts, *, dim: int = 5, domains: int = 4, length: int = 2, per_class: bool = True, temperature: float = 0.01,
    at_once: int = 256,
) -> KeyedPromptHead:  # fmt: skip
    torch.manual_seed(0)
    return KeyedPromptHead(
        of, dim, domains=domains, length=length, per_class=per_class, temperature=temperature, at_once=at_once
    )


def by_hand(context: np.ndarray, name: str, tower: MadeUpText) -> np.ndarray:
    """The vector of length 1 of one made-up sentence: the mean of context `(L, W)` and word, projected."""
    words = np.concatenate([context, tower._words(name).numpy()])
    vector = words.mean(0) @ tower._project.numpy()
    return vector / np.linalg.norm(vector)


def unit(rows: Tensor) -> np.ndarray:
    return (rows / rows.norm(dim=1, keepdim=True)).numpy()


# ---- CoCoOp


def test_cocoops_parameters_are_the_papers() -> None:
    """16 x 512 of context, 512 -> 32 -> 512 with biases."""
    head = ConditionalPromptHead(prompts(512, 512), 512, CoCoOp().length, 256)
    assert sum(p.numel() for p in head.parameters()) == 16 * 512 + (512 * 32 + 32) + (32 * 512 + 512) == 41_504
    assert float(head.context.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_cocoops_logits_by_hand() -> None:
    of = prompts()
    head, v = conditional(of), functional.normalize(images(3), dim=1)
    first, _, second = head.meta
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    context, w1, b1, w2, b2 = (
        t.detach().numpy() for t in (head.context, first.weight, first.bias, second.weight, second.bias)
    )
    expected = np.empty((3, 3))
    for i, row in enumerate(v.numpy()):
        shift = w2 @ np.maximum(w1 @ row + b1, 0) + b2
        for c, name in enumerate(NAMES):
            expected[i, c] = SCALE * row @ by_hand(context + shift, name, of.tower)  # type: ignore[arg-type]
    found = head(v).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found[0] / found[1] - 1).min() > 1e-3, "images should differ, or this test shows nothing"


def test_cocoop_sees_images_at_length_1() -> None:
    model = NETWORK.model(CoCoOp(length=2)).eval()
    h = torch.randn(3, *model.frozen(torch.zeros(1, 3, 16, 16)).shape[1:], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(model, 7 * h), logits(model, h), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [1, 4, 7])
def test_splitting_texts_changes_neither_logits_nor_gradients(at_once: int) -> None:
    """Twelve texts at once, or a few; where a gradient is wanted, a part is encoded again for it."""
    v, labels = functional.normalize(images(4), dim=1), torch.tensor([0, 1, 2, 1])
    found = []
    for limit in (12, at_once):
        of = prompts()
        head = conditional(of, limit)
        logits = head(v)
        forward = list(passes(of))
        functional.cross_entropy(logits, labels).backward()
        assert sum(forward) == 12
        assert max(forward) == limit
        assert sum(passes(of)) == (12 if limit == 12 else 24)
        found.append([logits.detach(), *(p.grad for p in head.parameters())])
    for whole, parts in zip(*found, strict=True):
        assert whole is not None
        assert float(whole.abs().max()) > 0
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_a_real_text_side_may_run_again_for_the_gradient(tmp_path: Path) -> None:
    """Its context is put in place by a hook, which must be there the second time too."""
    pytest.importorskip("open_clip", reason="extra `clip` not installed")
    text = {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 16, "patch_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"embed_dim": 8, "text_cfg": text, "vision_cfg": vision}))
    tower = load_backbone(f"open_clip:{tmp_path / 'config.json'}", pretrained=False, seed=0).text
    assert tower is not None
    of = prompts_for(tower, NAMES, TextOptions(), SCALE, seed=0)
    v, found = functional.normalize(images(4, 8), dim=1), []
    for limit in (12, 5):
        head = conditional(of, limit, 8)
        functional.cross_entropy(head(v), torch.tensor([0, 1, 2, 1])).backward()
        found.append([p.grad for p in head.parameters()])
    for whole, parts in zip(*found, strict=True):
        assert whole is not None
        assert float(whole.abs().max()) > 0
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_context_and_meta_net_both_learn() -> None:
    of = prompts()
    head = conditional(of)
    functional.cross_entropy(head(functional.normalize(images(4), dim=1)), torch.tensor([0, 1, 2, 1])).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


# ---- FedAPT


def test_fedapts_parameters() -> None:
    """C x L x W of context and K x D of the domain head; keys and a note of who has trained are no parameters."""
    head = keyed(prompts(512, 512), dim=512, domains=6, length=FedAPT().length)
    assert sum(p.numel() for p in head.parameters()) == 3 * 24 * 512 + 6 * 512 == 39_936
    shared = keyed(prompts(512, 512), dim=512, domains=6, length=FedAPT().length, per_class=False)
    assert sum(p.numel() for p in shared.parameters()) == 24 * 512 + 6 * 512
    assert head.keys.values.shape == (6, 24, 512)
    assert NETWORK.model(FedAPT()).head.context.shape == (4, 24, 8)
    assert NETWORK.model(FedAPT(context="shared", length=2)).head.context.shape == (2, 8)
    assert 0 <= float(head.keys.values.min()) < 0.001
    assert 0.999 < float(head.keys.values.max()) < 1
    assert float(head.keys.values.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("per_class", [True, False])
def test_fedapts_logits_with_the_clients_own_key_by_hand(per_class: bool) -> None:
    of = prompts()
    head, features = keyed(of, per_class=per_class), images(3)
    head.own = 2
    learned, key = head.context.detach().numpy(), head.keys.values[2].numpy()
    each = learned if per_class else [learned] * 3
    vectors = np.stack([by_hand(each[c] * (1 + key), name, of.tower) for c, name in enumerate(NAMES)])  # type: ignore[arg-type]
    np.testing.assert_allclose(
        head(features).detach().numpy(), SCALE * unit(features) @ vectors.T, rtol=1e-5, atol=1e-5
    )
    assert passes(of) == [3], "one context for the whole batch"


def test_the_mixture_by_hand() -> None:
    """Among the clients seen, by the published formula: the deviation divides by n - 1."""
    head, features = keyed(prompts(), temperature=0.5), images(3)
    head.seen[[0, 2, 3]] = True
    scores = (features @ head.domain.weight.detach().T).numpy()[:, [0, 2, 3]]
    z = (scores - scores.mean(1, keepdims=True)) / scores.std(1, ddof=1, keepdims=True) / 0.5
    expected = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    found = head.mixture(features).detach().numpy()
    np.testing.assert_allclose(found[:, [0, 2, 3]], expected, rtol=1e-4)
    assert (found[:, 1] == 0).all()


def test_the_mixture_at_its_limits() -> None:
    warm = keyed(prompts(), temperature=5.0)
    assert (warm.mixture(images(3)) > 0.1).all(), "before anybody has trained, all count"
    head, features = keyed(prompts()), images(3)
    head.seen[1] = True
    assert head.mixture(features).tolist() == [[0, 1, 0, 0]] * 3, "one client: its key"
    head.seen[2] = True
    of_two = head.mixture(features)
    assert set(of_two.flatten().tolist()) == {0.0, 1.0}, "of two, the nearer one alone"
    nn.init.zeros_(head.domain.weight)
    assert head.mixture(features).tolist() == [[0, 0.5, 0.5, 0]] * 3, "no difference: half of each"


def test_fedapts_logits_with_a_mixed_key_by_hand() -> None:
    of = prompts()
    head, features = keyed(of, temperature=0.5), images(3)
    head.seen[:] = True
    weights = head.mixture(features).detach().numpy()
    assert weights.max() < 0.99, "keys should mix, or this test shows nothing"
    context, keys = head.context.detach().numpy(), head.keys.values.numpy()
    expected = np.empty((3, 3))
    for i, row in enumerate(unit(features)):
        key = sum(weights[i, k] * keys[k] for k in range(4))
        for c, name in enumerate(NAMES):
            expected[i, c] = SCALE * row @ by_hand(context[c] * (1 + key), name, of.tower)  # type: ignore[arg-type]
    np.testing.assert_allclose(head(features).detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_images_that_call_for_the_same_key_share_its_texts() -> None:
    """As if each had its own, which it has where the mixture is not certain."""
    of = prompts()
    head, features = keyed(of, temperature=0.05), images(40)
    head.seen[:] = True
    weights = head.mixture(features).detach()
    certain = weights.amax(1) == 1
    keys = torch.einsum("nk,klw->nlw", weights, head.keys.values)
    vectors = encode_many(of, 40, lambda i, c: head.context[c] * (1 + keys[i]), 256)
    expected = SCALE * torch.einsum("bd,bcd->bc", functional.normalize(features, dim=1), vectors)
    passes(of).clear()
    torch.testing.assert_close(head(features), expected, rtol=1e-5, atol=1e-5)
    used = len(weights[certain].argmax(1).unique()) + int((~certain).sum())
    assert 1 < used < 40 > int(certain.sum()) > 0
    assert sum(passes(of)) == 3 * used


def test_distinct_rows() -> None:
    weights = torch.tensor([[1.0, 0, 0], [0.5, 0.25, 0.25], [1.0, 1e-9, 0], [0, 0, 1.0], [0.5, 0.25, 0.25]])
    rows, place = distinct(weights)
    assert sorted(rows.tolist()) == [[0, 0, 1], [0.5, 0.25, 0.25], [1, 0, 0]]
    torch.testing.assert_close(rows[place], weights.where(weights != 1e-9, 0.0), rtol=0, atol=0)


def test_splitting_fedapts_texts_changes_nothing() -> None:
    features = images(12)
    found = []
    for limit in (256, 4):
        of = prompts()
        head = keyed(of, temperature=0.5, at_once=limit)
        head.seen[:] = True
        with torch.inference_mode():
            found.append(head(features))
        assert max(passes(of)) == min(limit, 36)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


SCRIPT = """
from wardround.methods.check import NETWORKS
from wardround.methods.fedapt import FedAPT
print(NETWORKS["encoder"].model(FedAPT(length=2, domains=3), seed=7).head.keys.values.flatten().tolist())
"""


def test_keys_differ_by_client_and_are_the_same_in_another_process() -> None:
    method = FedAPT(length=2, domains=3)
    keys = NETWORK.model(method, seed=7).head.keys.values
    assert isinstance(keys, Tensor)
    assert not any(torch.allclose(keys[i], keys[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    elsewhere = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(elsewhere.stdout) == keys.flatten().tolist()
    assert not torch.equal(NETWORK.model(method, seed=8).head.keys.values, keys)  # type: ignore[arg-type]


def loaded(trial: Trial, client: str, **targets: float) -> Client:
    sent = named("state", trial.side.initial_state)
    sent |= named("target", {name: torch.tensor([value]) for name, value in targets.items()})
    return trial.new_answerer().load(client, Message(sent, {"round": 1, "phase": "train"}))


def test_fedapts_loss_by_hand() -> None:
    method = FedAPT(length=2, domains=3)
    trial = Trial(method, NETWORK, ["large"], loss="cross-entropy", class_weights="none")
    client = loaded(trial, "large")
    head = client.model.head
    assert isinstance(head, KeyedPromptHead)
    head.own = 1
    step = next(client.steps(1))
    raw = client.model.pool(step.inputs)
    scores = (raw @ head.domain.weight.T).detach().double().numpy()
    domain = (np.log(np.exp(scores).sum(1)) - scores[:, 1]).mean()
    expected = float(functional.cross_entropy(head(raw), step.labels).detach()) + domain
    assert float(method.loss(step).detach()) == pytest.approx(expected, rel=1e-5)
    assert client.log["domain_loss"] == pytest.approx(domain, rel=1e-5)


def test_each_client_has_its_number_and_the_server_notes_who_has_trained() -> None:
    trial = Trial(FedAPT(length=2, domains=6), NETWORK, ["large", "empty", "small"]).run(1)
    numbers = {visit.client: visit.down.tensors["target/number"].tolist() for visit in trial.visits()}
    assert numbers == {"large": [0], "empty": [1], "small": [2]}
    start, end = trial.history.servers
    assert not start["head.seen"].any()
    assert end["head.seen"].tolist() == [True, False, True, False, False, False]
    assert all("head.keys.values" not in name for visit in trial.visits() for name in visit.up.tensors)


def test_more_clients_than_room_is_an_error() -> None:
    server = Server({}, names=("a", "b", "c"))
    with pytest.raises(InputError, match=r"method.domains = 2: the federation has 3 clients \(allowed: 3 or more\)"):
        FedAPT(domains=2).targets(server, "a")
    assert FedAPT(domains=3).targets(server, "c")["number"].tolist() == [2]


@pytest.mark.parametrize("targets", [{}, {"number": 3.0}, {"number": -1.0}])
def test_a_client_refuses_a_number_without_a_key(targets: dict[str, float]) -> None:
    method = FedAPT(length=2, domains=3)
    client = loaded(Trial(method, NETWORK, ["large"]), "large", **targets)
    with pytest.raises(BadMessage, match="no number from 0 to 2"):
        method.train(client, "train")


# ---- both

METHODS: dict[str, Method] = {"cocoop": CoCoOp(length=3), "fedapt": FedAPT(length=3, domains=2)}


@pytest.mark.parametrize("name", METHODS)
def test_all_that_is_shared_is_averaged_each_client_the_same(name: str) -> None:
    """By hand over two clients of different size; context, meta-net and domain head all move."""
    trial = Trial(METHODS[name], NETWORK, ["large", "small"]).run(1)
    one, other = (visit.up.under("state") for visit in trial.visits())
    start, end = trial.history.servers
    parts = {"cocoop": ["head.meta.0.weight", "head.meta.0.bias", "head.meta.2.weight", "head.meta.2.bias"]}
    floating = ["head.context", *parts.get(name, ["head.domain.weight"])]
    assert set(end) == {*floating, *(["head.seen"] if name == "fedapt" else [])}
    for entry in floating:
        mean = (one[entry].double() + other[entry].double()) / 2
        torch.testing.assert_close(end[entry].double(), mean, rtol=1e-6, atol=1e-8)
        assert not torch.equal(one[entry], other[entry]), entry
        assert not torch.equal(end[entry], start[entry]), entry


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("loss", ["cross-entropy", "focal"])
def test_absent_classes_and_a_batch_of_one_are_finite(name: str, loss: str) -> None:
    method, clients = METHODS[name], {"one": (0, 1, 0, 0), "two": (1, 0, 0, 1)}
    trial = Trial(method, NETWORK, clients, batch_size=1, loss=loss).run(2)
    for visit in trial.visits():
        assert math.isfinite(visit.up.scalars["loss"])
        assert visit.changed
    assert all(torch.isfinite(tensor).all() for tensor in trial.history.servers[-1].values())


SHARED = FedAPT(length=2, domains=4, context="shared", temperature=1.0, texts_at_once=5)


@pytest.mark.parametrize("method", [CoCoOp(length=1, texts_at_once=3), SHARED])
def test_other_settings_conform(method: Method) -> None:
    outcome = check_method(method, "encoder", rounds=2)
    assert outcome == dict.fromkeys(CHECKS, PASSED) | {"persistence": "not applicable: nothing is local"}


@pytest.mark.parametrize("name", METHODS)
def test_an_encoder_without_text_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"has no text side, which {name} needs"):
        NETWORKS["resnet4"].model(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_the_model_holds_all_that_predicts(name: str) -> None:
    """Into a network that another seed made, the state brings everything: no memory, no message, no seed."""
    trial = Trial(METHODS[name], NETWORK, ["large", "small"]).run(2)
    fresh = NETWORK.model(METHODS[name], seed=9).eval()
    h = torch.randn(5, *trial.model.frozen(torch.zeros(1, 3, 16, 16)).shape[1:])
    assert not torch.allclose(logits(fresh, h), logits(trial.model, h))
    fresh.load_state_dict(trial.model.state_dict())
    assert torch.equal(logits(fresh, h), logits(trial.model, h))
    assert METHODS[name].predicts_with_text
    assert set(METHODS[name].rules(fresh).names(Owner.FROZEN)) >= {"prompts.vectors"}


def logits(model: Classifier, h: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(h)  # type: ignore[no-any-return]
