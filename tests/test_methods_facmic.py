"""FACMIC: the discrepancy by hand, the ramp, and that the held-out site's images and nothing else come in."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linear_trial import loaded, memory
from wardround.data.federation import Federation
from wardround.errors import InputError
from wardround.methods import facmic
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.facmic import FACMIC, NormalisedAdapter, unlabelled_batches
from wardround.methods.fedclip import FedCLIP
from wardround.methods.lmmd import lmmd, ramp_after, rbf_kernels
from wardround.methods.on_text import prompts_of
from wardround.methods.trial import CLIENTS, Trial
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step
from wardround.training.losses import contrastive_loss

ENCODER = NETWORKS["encoder"]


def trial(method: FedCLIP | None = None, *clients: str, **training: object) -> Trial:
    """Of FACMIC as it is by default, on "large" and "small"."""
    return Trial(method or FACMIC(), ENCODER, clients or ("large", "small"), **training)


# ---- the discrepancy


def by_loops(source: np.ndarray, target: np.ndarray, labels: np.ndarray, p: np.ndarray) -> float:
    """The definition, one pair of images at a time."""
    rows = np.concatenate([source, target])
    n = len(rows)
    mean = sum(((a - b) ** 2).sum() for a in rows for b in rows) / (n * n - n)

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return sum(math.exp(-((a - b) ** 2).sum() / (mean / 4 * 2**k)) for k in range(5))

    common = sorted(set(labels.tolist()) & set(p.argmax(1).tolist()))
    total = 0.0
    for c in common:
        ws = [float(y == c) / float((labels == c).sum()) for y in labels]
        wt = [row[c] / p[:, c].sum() for row in p]
        total += sum(
            ws[i] * ws[j] * kernel(source[i], source[j]) for i, j in itertools.product(range(len(ws)), repeat=2)
        )
        total += sum(
            wt[i] * wt[j] * kernel(target[i], target[j]) for i, j in itertools.product(range(len(wt)), repeat=2)
        )
        total -= 2 * sum(ws[i] * wt[j] * kernel(source[i], target[j]) for i in range(len(ws)) for j in range(len(wt)))
    return total / len(common)


def test_the_discrepancy_by_loops() -> None:
    """Batches of different size; class 3 is no source label, and class 0 no target's likeliest."""
    rng = np.random.default_rng(0)
    source, target = rng.normal(size=(6, 5)), rng.normal(size=(4, 5)) + 0.5
    labels = np.array([0, 1, 1, 2, 2, 0])
    p = np.array([[0.1, 0.6, 0.2, 0.1], [0.2, 0.1, 0.1, 0.6], [0.3, 0.1, 0.5, 0.1], [0.1, 0.5, 0.3, 0.1]])
    found = lmmd(*map(torch.from_numpy, (source, target, labels, p)))
    assert float(found) == pytest.approx(by_loops(source, target, labels, p), rel=1e-9)
    assert float(found) > 0.1


def test_sets_that_weigh_alike_have_no_discrepancy() -> None:
    """Every image twice in the target, in another order."""
    torch.manual_seed(0)
    source, labels = torch.randn(5, 8), torch.tensor([0, 1, 1, 2, 0])
    order = torch.randperm(10)
    target, guesses = source.repeat(2, 1)[order], torch.eye(3)[labels].repeat(2, 1)[order]
    assert float(lmmd(source, target, labels, guesses).abs()) < 1e-6
    assert float(lmmd(source, target + 1, labels, guesses)) > 0.1
    assert float(lmmd(source, target, labels, guesses.roll(1, dims=1))) > 0.1  # the same images, as other classes


def test_the_kernels_by_hand() -> None:
    """Three points on a line at 0, 1 and 3: squared distances 1, 4 and 9 have the mean 14/3."""
    found = rbf_kernels(torch.tensor([[0.0], [1.0], [3.0]]))
    widths = [14 / 3 / 4 * times for times in (1, 2, 4, 8, 16)]
    assert found.diagonal().tolist() == [5.0] * 3
    for (i, j), squared in {(0, 1): 1, (1, 2): 4, (0, 2): 9}.items():
        assert float(found[i, j]) == pytest.approx(sum(math.exp(-squared / width) for width in widths), rel=1e-6)


def test_without_a_class_in_common_there_is_no_discrepancy() -> None:
    source = torch.randn(3, 4, requires_grad=True)
    guesses = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])  # no mass at all on the source's classes
    found = lmmd(source, torch.randn(2, 4), torch.tensor([0, 1, 1]), guesses)
    found.backward()
    assert float(found.detach()) == 0
    assert source.grad is not None
    assert float(source.grad.abs().max()) == 0


def test_one_image_on_either_side_and_all_images_alike_are_finite() -> None:
    one = torch.ones(1, 4, requires_grad=True)
    for target in (torch.ones(1, 4), torch.zeros(3, 4)):
        found = lmmd(one, target, torch.tensor([1]), torch.tensor([[0.2, 0.8]]).expand(len(target), 2))
        (gradient,) = torch.autograd.grad(found, one)
        assert torch.isfinite(found)
        assert torch.isfinite(gradient).all()


def test_guesses_are_no_way_to_lower_the_discrepancy() -> None:
    """A gradient through the weights could draw all mass to one image."""
    p = torch.softmax(torch.randn(4, 2, requires_grad=True), 1)
    source = torch.randn(4, 3, requires_grad=True)
    lmmd(source, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), p).backward()
    assert p.grad_fn is not None
    assert source.grad is not None
    with pytest.raises(RuntimeError, match="does not require grad"):
        lmmd(source.detach(), torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), p).backward()


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (500, 0.2449187), (1000, 0.4621172), (5000, 0.4621172)])
def test_the_ramp_by_hand(step: int, expected: float) -> None:
    assert ramp_after(step) == pytest.approx(expected, abs=1e-7)


# ---- the method


def test_the_adapter_has_the_published_size() -> None:
    state = NormalisedAdapter(512).state_dict()
    counters = [tensor for tensor in state.values() if not tensor.is_floating_point()]
    assert sum(tensor.numel() for tensor in state.values()) - len(counters) == 527_360
    assert len(counters) == 1


def test_the_adapter_by_numpy() -> None:
    torch.manual_seed(0)
    adapter, features = NormalisedAdapter(6).double().eval(), torch.randn(3, 6).double()
    w1, b1, w2, b2 = (parameter.detach().numpy() for n, parameter in adapter.named_parameters() if "layers.1" not in n)
    x = (features.numpy() @ w1.T + b1) / np.sqrt(1 + 1e-5)  # running statistics are 0 and 1 at the start
    x = np.where(x > 0, x, 0.01 * x) @ w2.T + b2
    v = np.exp(x) / np.exp(x).sum(1, keepdims=True) * features.numpy()
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    np.testing.assert_allclose(adapter(features).detach().numpy(), v, rtol=1e-9)


def beginning(method: FACMIC, target: Tensor) -> Step:
    """A step of "large" with an image of each class and a ramp that is over, beside `target`."""
    client = loaded(trial(method), "large")
    client.scratch = {"taken": 1000, "target": itertools.repeat(target)}
    client.model.eval()  # else the second look at the same step would find other running statistics
    return replace(next(iter(client.steps(1))), labels=torch.arange(4))


def images(seed: int, count: int = 6) -> Tensor:
    """What the frozen blocks of the trial's network might make of images."""
    shape = next(iter(loaded(trial(), "large").steps(1))).inputs.shape[1:]
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["adapted", "unadapted"])
def test_the_loss_is_the_sum_of_its_parts(kind: str) -> None:
    target = images(0)
    method = FACMIC(lmmd_weight=3.0, target_adapter=kind)  # type: ignore[arg-type]
    step = beginning(method, target)
    model, prompts = step.client.model, prompts_of(step.client.model)
    v = model.features(step.inputs)
    raw = model.pool(target)
    z = model.features(target) if kind == "adapted" else raw / raw.norm(dim=1, keepdim=True)
    distance = lmmd(v, z, step.labels, torch.softmax(100 * z @ prompts.vectors.T, 1))
    assert float(distance.detach()) > 0.1
    expected = contrastive_loss(100 * v @ prompts.vectors.T, step.labels, "instance") + 3 * 0.4621172 * distance
    torch.testing.assert_close(method.loss(step), expected, rtol=1e-5, atol=1e-6)
    assert step.client.log["lmmd"] == pytest.approx(float(distance.detach()), abs=1e-5)


@pytest.mark.parametrize("kind", ["adapted", "unadapted"])
def test_what_the_held_out_images_show_comes_in(kind: str) -> None:
    """With an attention that is the same for all images, what is left of z is what the images show.

    FedMedCLIP's copy of the method put the attention for the held-out images on the *client's* features.
    """
    method = FACMIC(target_adapter=kind)  # type: ignore[arg-type]
    found = []
    for seed in (0, 1):
        step = beginning(method, images(seed))
        model = step.client.model
        for parameter in model.neck.layers[3].parameters():  # type: ignore[index,union-attr]
            torch.nn.init.zeros_(parameter)
        method.loss(step)
        v, z = (functional.normalize(model.pool(x), dim=1) for x in (step.inputs, images(seed)))
        distance = lmmd(v, z, step.labels, torch.softmax(prompts_of(model).logits(z), 1))
        found.append(step.client.log["lmmd"])
        assert found[-1] == pytest.approx(float(distance), rel=1e-3)
    assert min(found) > 0.1
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_the_adapter_sees_the_held_out_site_where_it_adapts_it() -> None:
    """Running statistics, which travel, are of the client's images alone where z is left unadapted."""
    changed = {}
    for kind in ("adapted", "unadapted"):
        method = FACMIC(target_adapter=kind)  # type: ignore[arg-type]
        client = loaded(trial(method, batch_size=16), "large")  # one step
        method.train(client, "train")
        changed[kind] = int(client.model.state_dict()["neck.layers.1.num_batches_tracked"])
    assert changed == {"adapted": 2, "unadapted": 1}


def test_steps_on_the_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "large" takes three a round."""
    asked: list[int] = []
    monkeypatch.setattr(facmic, "ramp_after", lambda step: asked.append(step) or 0.0)
    going_on = trial(FACMIC(), "large").run(3)
    assert asked == list(range(9))
    assert int(memory(going_on, "large")["steps"]) == 9
    asked.clear()
    anew = trial(FACMIC(ramp="round"), "large").run(3)
    assert asked == [0, 1, 2] * 3
    assert not memory(anew, "large")


def test_clients_count_their_own_steps() -> None:
    both = trial().run(2)
    assert {name: int(memory(both, name)["steps"]) for name in ("large", "small")} == {"large": 6, "small": 4}


class Plain(FedCLIP):
    """FedCLIP with FACMIC's adapter."""

    def edit(self, model: Classifier, image_size: int) -> None:
        FACMIC().edit(model, image_size)


def test_without_weight_it_is_the_plain_adapter() -> None:
    ours, plain = trial(FACMIC(lmmd_weight=0)).run(2), trial(Plain(weights="examples")).run(2)
    assert ours.loop.server.state.keys() == plain.loop.server.state.keys()
    assert all(torch.equal(tensor, plain.loop.server.state[n]) for n, tensor in ours.loop.server.state.items())
    drawn = trial().run(2).loop.server.state
    assert not all(torch.equal(tensor, drawn[n]) for n, tensor in plain.loop.server.state.items())


def with_held_out(made: Trial, federation: Federation) -> Trial:
    """The same trial with other images elsewhere."""
    made.answerer.federation = federation
    return made


def test_labels_of_the_held_out_site_are_not_used() -> None:
    made = trial()
    (site,) = made.federation.held_out
    shuffled = replace(site.test, labels=(site.test.labels + 1) % 4)
    wrong = replace(made.federation, held_out=(replace(site, test=shuffled),))
    expected = made.run(2).loop.server.state
    found = with_held_out(trial(), wrong).run(2).loop.server.state
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_its_images_are() -> None:
    made = trial()
    (site,) = made.federation.held_out
    dark = replace(made.federation, held_out=(replace(site, test=replace(site.test, images=site.test.images // 3)),))
    expected = made.run(2).loop.server.state
    found = with_held_out(trial(), dark).run(2).loop.server.state
    assert not all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_without_a_held_out_site_it_says_what_it_needs() -> None:
    client = loaded(trial(), "large")
    for nothing in (None, replace(client.inputs, views=[torch.zeros(0, 1)])):  # type: ignore[type-var]
        with pytest.raises(InputError, match=r"set data\.held_out or data\.held_out_share"):
            FACMIC().train(replace(client, unlabelled=nothing), "train")
    assert math.isfinite(FACMIC(lmmd_weight=0).train(replace(client, unlabelled=None), "train"))


def rows_of(client: Client, count: int) -> list[list[int]]:
    """The rows of the held-out site's first batches."""

    class Rows:
        def __len__(self) -> int:
            return 8

        def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
            assert stream is None
            return rows

    batches = unlabelled_batches(replace(client, unlabelled=Rows()))
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def test_batches_of_the_held_out_site_go_on_and_on() -> None:
    """Eight images in batches of four: every pass has each of them once, in an order of its own."""
    first = rows_of(loaded(trial(), "large"), 4)
    assert [len(rows) for rows in first] == [4, 4, 4, 4]
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == list(range(8))
    assert first[:2] != first[2:]
    assert first == rows_of(loaded(trial(), "large"), 4)
    assert first != rows_of(loaded(trial(), "small"), 4)
    assert first != rows_of(loaded(trial(), "large", round=2), 4)


def test_classes_keep_their_numbers_where_some_are_absent() -> None:
    """A client with the last two classes alone is compared with their prompts, and with guesses of them."""
    made = Trial(FACMIC(), ENCODER, {"late": (0, 0, 3, 3)}, batch_size=8)
    client = loaded(made, "late")
    client.model.eval()
    target = images(0)
    client.scratch = {"taken": 1000, "target": itertools.repeat(target)}
    step = next(iter(client.steps(1)))
    assert set(step.labels.tolist()) == {2, 3}
    v, vectors = client.model.features(step.inputs), prompts_of(client.model).vectors
    expected = contrastive_loss(100 * v @ vectors.T, step.labels, "instance")
    torch.testing.assert_close(FACMIC().loss(step) - 0.4621172 * client.log["lmmd"], expected, rtol=1e-4, atol=1e-5)
    source, labels = torch.randn(4, 3), torch.tensor([2, 3, 2, 3])
    assert float(lmmd(source, torch.randn(4, 3), labels, torch.eye(4)[[2, 3, 2, 3]])) > 0
    assert float(lmmd(source, torch.randn(4, 3), labels, torch.eye(4)[[0, 1, 0, 1]])) == 0


@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_clients(number: int) -> None:
    """Weights by images; no site or number of sites is built in."""
    counts = {f"site-{i}": (i + 1, 1, 1, 0) for i in range(number)}
    made = Trial(FACMIC(), ENCODER, counts).run(1)
    replies = [visit.up for visit in made.visits()]
    assert [reply.scalars["examples"] for reply in replies] == [i + 3 for i in range(number)]
    name = "neck.layers.0.weight"
    mean = sum((i + 3) * reply.under("state")[name].double() for i, reply in enumerate(replies))
    mean = mean / sum(i + 3 for i in range(number))
    torch.testing.assert_close(made.loop.server.state[name].double(), mean, rtol=1e-6, atol=1e-8)


def test_batches_of_one_image_leave_batch_statistics_alone() -> None:
    made = Trial(FACMIC(), ENCODER, {"single": CLIENTS["single"]}, batch_size=1).run(2)
    state = made.loop.server.state
    assert int(state["neck.layers.1.num_batches_tracked"]) == 0
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_it_says_that_it_is_transductive() -> None:
    assert "transductive" in FACMIC.title
    model = ENCODER.model(FACMIC())
    assert "transductive" in FACMIC().cautions(model, {})[0]
    assert FACMIC(lmmd_weight=0).cautions(model, {}) == []


@pytest.mark.parametrize("method", [FACMIC(), FACMIC(target_adapter="unadapted", ramp="round"), FACMIC(lmmd_weight=0)])
def test_it_conforms(method: FACMIC) -> None:
    outcome = check_method(method, "encoder")
    assert {text for text in outcome.values() if text != PASSED} == {"not applicable: nothing is local"}
    assert all("has no text side" in text for text in check_method(method, "resnet4").values())
