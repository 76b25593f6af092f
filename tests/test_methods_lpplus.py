"""LP++: two steps and the start by NumPy, what travels, and classes that are absent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from linear_trial import loaded
from wardround.federation.server import Server
from wardround.methods.base import ServerSide
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.lpplus import CENTROIDS, LPPlus
from wardround.methods.on_text import prompts_of
from wardround.methods.trial import CLASSES, Trial
from wardround.models.blended_head import BlendedHead, descend, largest_eigenvalue
from wardround.training.client import Client

ENCODER = NETWORKS["encoder"]
W, ALPHA = "head.prototypes", "head.alpha"


def trial(method: LPPlus | None = None, *clients: str, **training: object) -> Trial:
    """On "large", which lacks a class, and "small"."""
    return Trial(method or LPPlus(), ENCODER, clients or ("large", "small"), **training)


def images_of(made: Trial, client: str) -> tuple[np.ndarray, np.ndarray]:
    """Features `(N, D)` of length 1 in float64, and labels, straight from the network's frozen blocks."""
    model, data = made.model, made.federation.client(client).train
    with torch.no_grad():
        features = model.pool(model.prefix(model.prepare(torch.from_numpy(data.images)))).double().numpy()
    return features / np.linalg.norm(features, axis=1, keepdims=True), data.labels


def text(made: Trial) -> np.ndarray:
    return prompts_of(made.model).vectors.double().numpy()


def loss_of(w: np.ndarray, alpha: np.ndarray, t: np.ndarray, v: np.ndarray, y: np.ndarray) -> float:
    logits = v @ (w + alpha[:, None] * t).T
    top = logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(y)), y]))


def slope(w: np.ndarray, alpha: np.ndarray, t: np.ndarray, v: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the loss by each logit, `(N, C)`."""
    logits = v @ (w + alpha[:, None] * t).T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p / len(y)


# ---- the head and its steps


def head_of(classes: int = 3, size: int = 5) -> BlendedHead:
    """With prompts of this network's own."""
    prompts = prompts_of(ENCODER.model(LPPlus()))
    head = BlendedHead(prompts, size)
    prompts.vectors = functional.normalize(torch.randn(classes, size), dim=1)
    head.prototypes = torch.nn.Parameter(torch.randn(classes, size))
    head.alpha = torch.nn.Parameter(torch.rand(classes))
    head.out_features = classes
    return head


def test_logits_blend_prototypes_and_prompts() -> None:
    torch.manual_seed(0)
    head, v = head_of(), torch.randn(2, 5)
    for i, c in ((0, 0), (1, 2)):
        expected = v[i] @ head.prototypes[c] + head.alpha[c] * (v[i] @ head.text[c])
        assert float(head(v)[i, c].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_before_any_image_the_prompts_decide() -> None:
    model = ENCODER.model(LPPlus())
    v = functional.normalize(torch.randn(4, model.head.in_features), dim=1)
    torch.testing.assert_close(model.head(v), prompts_of(model).logits(v))


@pytest.mark.parametrize("count", [3, 9])
def test_the_largest_eigenvalue(count: int) -> None:
    """Of fewer images than features, and of more."""
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    assert largest_eigenvalue(rows) == pytest.approx(np.linalg.svd(rows.numpy())[1][0] ** 2, rel=1e-5)


def test_no_step_makes_the_loss_rise() -> None:
    """Far from the minimum and near it, on prototypes and on alpha."""
    torch.manual_seed(0)
    v, y = functional.normalize(torch.randn(40, 5), dim=1), torch.arange(40) % 3
    losses = descend(head_of(), v, y, cycles=60, w_steps=1)
    assert float(losses.diff().max()) <= 1e-6
    assert float(losses[-1]) < float(losses[0]) - 0.05


def test_features_of_length_0_move_nothing() -> None:
    head = head_of()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    losses = descend(head, torch.zeros(2, 5), torch.tensor([0, 1]), cycles=1, w_steps=1)
    assert torch.isfinite(losses).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


# ---- a round


def centroids(made: Trial, *clients: str) -> tuple[np.ndarray, np.ndarray]:
    """w and alpha as they start, image by image."""
    rows, t = [(v, y) for name in clients for v, y in zip(*images_of(made, name), strict=True)], text(made)
    w, cosines = np.zeros_like(t), []
    for c in range(CLASSES):
        own = [v for v, y in rows if y == c]
        if own:
            w[c] = np.mean(own, axis=0)
            cosines.append(np.mean([v @ t[c] for v in own]))
    return w, np.full(CLASSES, 250 * np.mean(cosines))


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_the_start_is_that_of_all_images_together(weights: str) -> None:
    """Whatever clients count in averages, every image counts the same."""
    made = trial(LPPlus(weights=weights)).run(1)  # type: ignore[arg-type]
    _, visit = made.visits("small")
    w, alpha = centroids(made, "large", "small")
    np.testing.assert_allclose(visit.down.under("state")[W].numpy(), w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(visit.down.under("state")[ALPHA].numpy(), alpha, rtol=1e-4)


def test_two_steps_and_one_on_alpha_by_numpy() -> None:
    made = trial(LPPlus(w_steps=2), "large").run(1)
    v, y = images_of(made, "large")
    t, (w, alpha) = text(made), centroids(made, "large")
    w_rate = 4 * len(y) / np.linalg.svd(v)[1][0] ** 2
    alpha_rate = 4 * len(y) / max(sum((row @ t[c]) ** 2 for row in v) for c in range(CLASSES))
    losses = []
    for _ in range(2):
        losses.append(loss_of(w, alpha, t, v, y))
        w = w - w_rate * slope(w, alpha, t, v, y).T @ v
    losses.append(loss_of(w, alpha, t, v, y))
    change = slope(w, alpha, t, v, y)
    alpha = alpha - alpha_rate * np.array([sum(change[i, c] * (v[i] @ t[c]) for i in range(len(y))) for c in range(4)])
    up = made.visits("large")[-1].up
    np.testing.assert_allclose(up.under("state")[W].numpy(), w, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(up.under("state")[ALPHA].numpy(), alpha, rtol=1e-3)
    assert up.scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_slope_is_that_of_the_loss() -> None:
    """What the test above takes for the gradient, by differences."""
    rng = np.random.default_rng(0)
    w, alpha, t, v, y = (
        rng.normal(size=(3, 4)),
        rng.normal(size=3),
        rng.normal(size=(3, 4)),
        rng.normal(size=(5, 4)),
        None,
    )
    y = np.array([0, 1, 2, 1, 1])
    change = slope(w, alpha, t, v, y)
    step = np.zeros_like(w)
    step[1, 2] = 1e-6
    numeric = (loss_of(w + step, alpha, t, v, y) - loss_of(w - step, alpha, t, v, y)) / 2e-6
    assert (change.T @ v)[1, 2] == pytest.approx(numeric, rel=1e-5)
    step = np.array([0, 0, 1e-6])
    numeric = (loss_of(w, alpha + step, t, v, y) - loss_of(w, alpha - step, t, v, y)) / 2e-6
    assert (change * (v @ t.T)).sum(0)[2] == pytest.approx(numeric, rel=1e-5)


def test_a_round_has_as_many_cycles_as_local_epochs() -> None:
    twice = trial(LPPlus(w_steps=1), "large", local_epochs=2).run(1).loop.server.state
    once = trial(LPPlus(w_steps=1), "large").run(2).loop.server.state
    torch.testing.assert_close(twice[W], once[W])
    torch.testing.assert_close(twice[ALPHA], once[ALPHA])


def test_batches_and_rates_play_no_part() -> None:
    usual = trial().run(2).loop.server.state
    other = trial(None, batch_size=1, lr=7.0, optimizer="adam", loss="focal").run(2).loop.server.state
    torch.testing.assert_close(usual[W], other[W], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(usual[ALPHA], other[ALPHA], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_clients_each_the_same(number: int) -> None:
    """No number of sites is built in."""
    counts = {f"site-{i}": (i + 1, 1, 1, 0) for i in range(number)}
    made = Trial(LPPlus(), ENCODER, counts).run(1)
    ups = [visit.up.under("state") for visit in made.visits() if visit.phase == "train"]
    assert len(ups) == number
    for name in (W, ALPHA):
        mean = torch.stack([up[name].double() for up in ups]).mean(0)
        torch.testing.assert_close(made.loop.server.state[name].double(), mean, rtol=1e-6, atol=1e-7)


# ---- what travels


def test_messages_are_small() -> None:
    model, method = ENCODER.model(LPPlus()), LPPlus()
    side, d = ServerSide(method, model, ENCODER.image_size), model.head.in_features
    assert side.shared_elements == CLASSES * (d + 1)
    assert set(side.reply_schema("train")) == {f"state/{W}", f"state/{ALPHA}"}
    sizes = {name: tuple(spec.shape) for name, spec in side.reply_schema(CENTROIDS).items()}
    assert sizes == {"statistic/count": (4,), "statistic/sum": (4, d), "statistic/cosine": (4,)}
    assert list(method.phases(1)) == [CENTROIDS, "train"]
    assert list(method.phases(2)) == ["train"]


def first(made: Trial, name: str) -> Client:
    """A client in the exchange before the first round."""
    client = loaded(made, name)
    client.phase = CENTROIDS
    return client


def test_rare_classes_stay() -> None:
    """ "small" has 2, 3, 2 and 2 images."""
    client, method = first(trial(), "small"), LPPlus()
    everything = method.statistics(client)
    assert everything["count"].tolist() == [2, 3, 2, 2]
    kept = method.release(client, everything, 3)
    assert kept["count"].tolist() == [0, 3, 0, 0]
    assert not kept["sum"][[0, 2, 3]].any()
    assert not kept["cosine"][[0, 2, 3]].any()
    assert torch.equal(kept["sum"][1], everything["sum"][1])
    assert torch.equal(kept["cosine"][1], everything["cosine"][1])


def test_where_all_stays_the_prompts_decide() -> None:
    server = Server({W: torch.zeros(4, 5), ALPHA: torch.full((4,), 100.0)})
    nothing = {"count": torch.zeros(4), "sum": torch.zeros(4, 5), "cosine": torch.zeros(4)}
    LPPlus().absorb(server, nothing)
    LPPlus().absorb(server, {})
    assert not server.state[W].any()
    assert server.state[ALPHA].tolist() == [100.0] * 4


# ---- absent classes


def test_classes_keep_their_numbers_where_some_are_absent() -> None:
    """A client has the last two classes alone: their prototypes start at its images, and others at 0."""
    made = Trial(LPPlus(), ENCODER, {"late": (0, 0, 3, 3)}).run(2)
    start = made.visits("late")[1].down.under("state")
    v, y = images_of(made, "late")
    assert not start[W][:2].any()
    for c in (2, 3):
        np.testing.assert_allclose(start[W][c].numpy(), v[y == c].mean(0), rtol=1e-4, atol=1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in made.loop.server.state.values())


def test_a_class_that_one_client_lacks_starts_as_the_others_have_it() -> None:
    made = trial().run(1)
    v, y = images_of(made, "small")
    start = made.visits("large")[1].down.under("state")[W]
    np.testing.assert_allclose(start[3].numpy(), v[y == 3].mean(0), rtol=1e-4, atol=1e-6)


def test_a_client_with_one_image() -> None:
    made = trial(None, "single").run(3)
    assert all(torch.isfinite(tensor).all() for tensor in made.loop.server.state.values())
    assert made.visits("single")[-1].up.scalars["loss"] is not None


# ---- conformance


def test_it_learns_what_it_is_shown() -> None:
    """The training loss falls from round to round."""
    made = trial(None, "large").run(4)
    losses = [visit.up.scalars["loss"] for visit in made.visits() if visit.phase == "train"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", [LPPlus(), LPPlus(w_steps=1, weights="examples")])
def test_it_conforms(method: LPPlus) -> None:
    reasons = {text for text in check_method(method, "encoder").values() if text != PASSED}
    assert reasons == {"not applicable: nothing is local", "not applicable: a round has several exchanges"}
    assert all("has no text side" in text for text in check_method(method, "resnet4").values())
