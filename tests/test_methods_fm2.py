"""FM²: what travels, two stages that leave each other alone, the pull on M_d, the choice of images, the averages."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from deploy_fixtures import founded
from experiment_fixtures import checkpoint_bytes, tiny
from linear_trial import loaded
from wardround.answering import logits_in_batches, set_label_counts
from wardround.data import Federation
from wardround.data.federation import ClientData
from wardround.data.read import read_federation
from wardround.deploy.hospital import open_hospital
from wardround.deploy.serving import prepare
from wardround.errors import InputError
from wardround.evaluation.predictions import read_predictions
from wardround.experiment import run
from wardround.federation.messages import Message, named
from wardround.federation.rules import Owner
from wardround.federation.server import Reply, Server
from wardround.methods.base import ServerSide
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.fm2 import DOMAIN, FM2, mixtures
from wardround.methods.top_k import Score, highest, scores
from wardround.methods.trial import MODALITIES, Network, Trial
from wardround.models.classifier import build_classifier
from wardround.models.dual_moe import Size
from wardround.models.options import ModelOptions
from wardround.training.client import Client, Step
from wardround.using import export, load_exported, load_trained

WHOLE = Network("wardround:resnet4-lib", 16, "all", head="shared", dropout=0.0)
PAIR = "extras.mixtures."
FAMILIES = {"data.phantoms.family": "mixed", "data.phantoms.classes": 2, "rounds": 2, "method.name": "fm2"}


def trial(method: FM2 | None = None, modality: Mapping[str, int] | None = None, **training: Any) -> Trial:
    """Of "large" and "small", on a network of which everything trains; each of one modality where that is given."""
    made = Trial(method or FM2(), WHOLE, ("large", "small"), **training)
    if modality is not None:
        made.answerer.federation = made.federation = of_one_modality(made.federation, modality)
    return made


def of_one_modality(federation: Federation, modality: Mapping[str, int]) -> Federation:
    """The same images, each client's under one name."""

    def _all(client: ClientData) -> ClientData:
        kind = modality[client.name]
        parts = {s: client.split(s) for s in ("train", "val", "test")}
        return ClientData(client.name, **{s: replace(p, modality=np.full(len(p), kind)) for s, p in parts.items()})

    return replace(federation, clients=tuple(_all(client) for client in federation.clients))


def entries(client: Client, pair: bool) -> dict[str, Tensor]:
    """Copies of the model's entries inside or outside the two mixtures, buffers included."""
    state = client.model.state_dict().items()
    return {name: tensor.clone() for name, tensor in state if name.startswith(PAIR) == pair}


def alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- what travels


@pytest.mark.parametrize(("size", "shared"), [("tiny", 717_523), ("medium", 828_823), ("large", 1_051_423)])
@pytest.mark.parametrize("head", ["shared", "local"])
def test_the_published_upload(size: Size, shared: int, head: Any) -> None:
    options = ModelOptions(backbone="wardround:resnet4", pretrained=False, finetune_blocks="all", head=head)
    model = build_classifier(options, 37, 3, 28, seed=0, modalities=("fundus", "blood", "kidney", "colon", "skin"))
    method = FM2(size=size)
    method.edit(model, 28)
    side = ServerSide(method, model, 28)
    assert side.parameter_elements[Owner.SHARED.value] == shared
    assert dict(side.statistic_shapes("train")) == {f"images/{e}": () for e in range(5)}


def test_neither_m_c_nor_the_head_travels() -> None:
    """Whatever `model.head` says; of M_d the whole, and as numbers the images of each modality."""
    made = trial().run(2)
    for visit in made.visits():
        for message in (visit.down, visit.up):
            names = set(message.under("state"))
            assert names
            assert not [name for name in names if name.startswith(("head.", f"{PAIR}by_class."))]
            assert any(name.startswith(f"{DOMAIN}experts.1.") for name in names)
        assert set(visit.after) >= {"head.weight", f"{PAIR}by_class.gate.linear.weight"}
    told = {visit.client: visit.up.under("statistic") for visit in made.visits(round=1)}
    assert {n: float(t) for n, t in told["large"].items()} == {"images/0": 7, "images/1": 6}
    assert {n: float(t) for n, t in told["small"].items()} == {"images/0": 5, "images/1": 4}


def test_a_modality_with_few_images_is_not_told() -> None:
    method, client = FM2(), loaded(trial(), "large")
    assert set(method.release(client, method.statistics(client), 7)) == {"images/0"}
    assert not FM2(aggregation="plain").statistics(client)


def test_without_m_d_it_stays_at_home() -> None:
    visit = trial(FM2(gamma_d=0.0)).run(1).visits()[0]
    assert not [name for name in visit.up.under("state") if name.startswith(DOMAIN)]
    assert not visit.up.under("statistic")


# ---- stages


class Watched(FM2):
    """Notes what stage 2 finds and leaves."""

    def train_mixtures(self, client: Client) -> float:
        client.scratch["before"] = entries(client, False), entries(client, True)
        loss = super().train_mixtures(client)
        client.scratch["after"] = entries(client, False), entries(client, True)
        return loss


def test_stage_2_moves_no_bit_of_v_or_of_the_head() -> None:
    """Stage 1 does: weights, running statistics and counters."""
    method, client = Watched(), loaded(trial(), "large")
    start, pair = entries(client, False), entries(client, True)
    loss = method.train(client, "train")
    before, after = client.scratch["before"], client.scratch["after"]
    assert any("running_mean" in name for name in start)
    assert all(not torch.equal(tensor, start[name]) for name, tensor in before[0].items())
    assert alike(before[0], after[0])
    assert alike(pair, before[1])
    assert not alike(before[1], after[1])
    assert math.isfinite(loss)
    assert client.log["observer_loss"] != loss


def parts(made: Trial, client: str) -> list[tuple[bool, bool]]:
    """Whether what is outside and what is inside the mixtures changed, by round."""
    visits = made.visits(client)
    return [tuple(any(n.startswith(PAIR) == p for n in visit.changed) for p in (False, True)) for visit in visits]  # type: ignore[misc]


def test_schedules() -> None:
    """Both in each round; in turns; first the one and then the other."""
    both, first, second = (True, True), (True, False), (False, True)
    assert parts(trial().run(2), "large") == [both] * 2
    assert parts(trial(FM2(schedule="interleaved")).run(3), "large") == [first, second, first]
    assert parts(trial(FM2(schedule="sequential")).run(4), "small") == [first, first, second, second]
    assert parts(trial(FM2(schedule="sequential")).run(3), "small") == [first, first, second]
    assert parts(trial(FM2(schedule="sequential", observer_rounds=1)).run(3), "small") == [first, second, second]


def test_stage_2_sees_v_as_stage_1_left_it() -> None:
    """Features of all images, in eval mode, those of the chosen rows for a step; class weights are of these."""
    method, client = FM2(top_k=3), loaded(trial(), "large")
    model, rows = client.model, torch.arange(len(client))
    subset = method.subset(client)
    with torch.no_grad():
        features = model.features(client.inputs.batch(rows, None))
    chosen = method.choose(client, features)
    torch.testing.assert_close(subset.inputs.batch(torch.arange(len(subset)), None), features[chosen])
    assert torch.equal(subset.labels, client.labels[chosen])
    assert torch.equal(subset.modality, client.modality[chosen])
    assert client.counts.tolist() == [5, 4, 4, 0]
    assert subset.counts.tolist() == [3, 3, 3, 0]
    assert client.log == {"chosen_images": 9, "chosen_classes": 3, "classes_below_k": 0}


# ---- alignment, and what learns


def step_of(method: FM2, away: float = 0.0, seed: int = 0) -> Step:
    """A first step of stage 2 at "large", with M_d further from what was received by up to `away`."""
    client = method.subset(loaded(trial(method), "large"))
    domain = list(mixtures(client.model).domain.parameters())
    client.scratch["received"] = domain, [p.detach().clone() for p in domain]
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in domain:
            parameter.add_(away * (2 * torch.rand(parameter.shape, generator=stream) - 1))
    client.model.requires_grad_(True)
    return next(iter(client.steps(1)))


def gradients(method: FM2) -> tuple[dict[str, Tensor | None], Step]:
    step = step_of(method, away=0.3)
    method.backward_mixtures(step)
    return {name: p.grad for name, p in step.client.model.named_parameters()}, step


def test_the_gradient_of_the_alignment() -> None:
    """2 lambda (p - p^) on M_d, and nothing anywhere else."""
    plain, _ = gradients(FM2(strength=0.0))
    pulled, step = gradients(FM2(strength=0.25))
    parameters, received = step.client.scratch["received"]
    away = [p.detach() - start for p, start in zip(parameters, received, strict=True)]
    distance = dict(zip(map(id, parameters), away, strict=True))
    aligned = 0
    for name, parameter in step.client.model.named_parameters():
        before, after = plain[name], pulled[name]
        if id(parameter) in distance:
            assert after is not None
            zero = torch.zeros_like(after) if before is None else before
            torch.testing.assert_close(after - zero, 0.5 * distance[id(parameter)], rtol=1e-4, atol=1e-6)
            aligned += 1
        else:
            assert name.startswith(f"{PAIR}by_class.") or after is None
            assert (after is None and before is None) or torch.equal(after, before)  # type: ignore[arg-type]
    assert aligned == len(parameters) > 0


def test_alignment_makes_a_difference() -> None:
    """From the second step on; and the loss that is told is without it."""
    with_it, without = (trial(FM2(strength=s)).run(1).history.servers[1] for s in (0.1, 0.0))
    moved = {name for name, tensor in with_it.items() if not torch.equal(tensor, without[name])}
    assert moved
    assert all(name.startswith(DOMAIN) for name in moved)
    far, near = (FM2(strength=s).backward_mixtures(step_of(FM2(), away=0.3)) for s in (5.0, 0.0))
    assert torch.equal(far, near)


def test_experts_of_other_modalities_and_classes_stay_as_they_were() -> None:
    """To the bit, with alignment, weight decay and momentum: "large" has modality 1 and no image of class 3."""
    made = trial(FM2(), {"large": 1, "small": 0}, weight_decay=0.1, momentum=0.9).run(1)
    changed = made.visits("large")[0].changed
    assert not [name for name in changed if name.startswith((f"{DOMAIN}experts.0.", f"{PAIR}by_class.experts.3."))]
    for own in (f"{DOMAIN}experts.1.", f"{DOMAIN}classifier.", f"{PAIR}by_class.experts.0.", f"{PAIR}by_class.gate."):
        assert [name for name in changed if name.startswith(own)]


def after_one_step(weight_decay: float) -> dict[str, Tensor]:
    method, client = FM2(), loaded(trial(weight_decay=weight_decay, batch_size=32), "large")
    method.train_mixtures(method.subset(client))
    return entries(client, True)


def test_m_d_has_no_weight_decay() -> None:
    some, none = after_one_step(0.5), after_one_step(0.0)
    differ = {name for name, tensor in some.items() if not torch.equal(tensor, none[name])}
    assert f"{PAIR}by_class.classifier.weight" in differ
    assert not [name for name in differ if name.startswith(DOMAIN)]


def test_without_m_c_nothing_depends_on_it() -> None:
    """With gamma_c = 0 predictions are M_d's, and another M_c gives the same V, head and M_d."""
    made = [trial(FM2(gamma_d=1.0, gamma_c=0.0)) for _ in range(2)]
    for name, tensor in made[1].answerer._initial.items():
        if name.startswith(f"{PAIR}by_class."):
            tensor.add_(1.0)
    first, second = (one.run(2) for one in made)
    assert alike(first.history.servers[2], second.history.servers[2])
    assert not [n for v in first.visits() for n in v.changed if n.startswith(f"{PAIR}by_class.")]
    client = loaded(first, "large", state=first.loop.server.state)
    rows = torch.arange(len(client))
    inputs, client.shown = client.inputs.batch(rows, None), client.modality
    with torch.no_grad():
        expected = mixtures(client.model).domain(client.model.features(inputs), client.modality)
        assert torch.equal(FM2(gamma_d=1.0, gamma_c=0.0).predict(client, inputs), expected)
        assert torch.equal(FM2().predict_shared(client, inputs), expected)
    assert FM2().predicts_alone(client.model)
    assert not FM2(gamma_d=0.0).predicts_alone(client.model)


def test_a_prediction_by_hand() -> None:
    """gamma_d M_d + gamma_c M_c on logits, by each image's modality."""
    method = FM2(gamma_d=0.3, gamma_c=0.7)
    made = trial(method).run(1)
    client = loaded(made, "large", state=made.loop.server.state)
    pair, images = mixtures(client.model), made.federation.client("large").test
    inputs = made.answerer.client_inputs("large", "test").batch(torch.arange(len(images)), None)
    with torch.no_grad():
        v = client.model.features(inputs)
        by_modality = torch.stack(
            [pair.domain(v[i : i + 1], torch.tensor([m]))[0] for i, m in enumerate(images.modality.tolist())]
        )
        expected = 0.3 * by_modality + 0.7 * pair.by_class(v)
    torch.testing.assert_close(torch.from_numpy(made.answerer.logits(client, "test", images)), expected)
    assert set(images.modality.tolist()) == {0, 1}


def test_a_loss_on_the_gate() -> None:
    plain, guided = step_of(FM2()), step_of(FM2(gate_ce=0.5))
    gate = mixtures(guided.client.model).by_class.gate_logits(guided.inputs)
    chances = torch.softmax(gate, 1)[torch.arange(len(guided.labels)), guided.labels]
    expected = FM2().mixture_loss(plain) - 0.5 * chances.log().mean()
    torch.testing.assert_close(FM2(gate_ce=0.5).mixture_loss(guided), expected)


def test_gammas_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="leaves nothing to predict with"):
        FM2(gamma_d=0.0, gamma_c=0.0)
    with pytest.raises(InputError, match=r"method: gamma_d = gamma_c = 0 leaves nothing"):
        tiny(method__name="fm2", method__gamma_d=0.0, method__gamma_c=0.0).bound_method()


# ---- the choice of images


def test_the_highest_by_hand() -> None:
    """Two of class 0, which has four; both of class 2; of equal scores the first rows."""
    labels = torch.tensor([0, 2, 0, 0, 2, 0])
    assert highest(torch.tensor([0.1, -9.0, 0.7, 0.7, 3.0, 0.7]), labels, 2).tolist() == [1, 2, 3, 4]
    assert highest(torch.zeros(6), labels, 1).tolist() == [0, 1]
    assert highest(torch.zeros(6), labels, None).tolist() == list(range(6))
    assert highest(torch.zeros(6), labels, 200).tolist() == list(range(6))


V = np.array([[1.0, -2.0], [0.5, 0.5], [3.0, 0.0], [-1.0, 4.0]])
LOGITS, LABELS = np.array([[60.0, 0.0], [1.0, -2.0], [50.0, 9.0], [0.0, 0.3]]), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("own-logit", [60.0, -2.0, 50.0, 0.3]),
        ("activation", [(1 / (1 + math.exp(-a)) + 1 / (1 + math.exp(-b))) / 2 for a, b in V.tolist()]),
        # The mean features of the classes are (2, -1) and (-0.25, 2.25).
        (
            "class-mean",
            [
                4 / math.sqrt(5 * 5),
                (0.5 * 2) / math.sqrt(0.5 * (0.25**2 + 2.25**2)),
                6 / math.sqrt(9 * 5),
                (0.25 + 9) / math.sqrt(17 * (0.25**2 + 2.25**2)),
            ],
        ),
    ],
)
def test_scores_by_hand(kind: Score, expected: Sequence[float]) -> None:
    """A sigmoid around the first would make 60 and 50 the same number."""
    v, logits = (torch.from_numpy(values).float() for values in (V, LOGITS))
    found = scores(kind, v, logits, torch.from_numpy(LABELS), torch.Generator())
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_random_choice_is_the_clients_own_in_every_round() -> None:
    method = FM2(score="random", top_k=1)

    def chosen(client: str, round: int) -> list[int]:
        found = loaded(trial(), client, round)
        return method.choose(found, torch.zeros(len(found), 64)).tolist()

    assert chosen("large", 1) == chosen("large", 1)
    assert len({tuple(chosen("large", round)) for round in range(1, 6)}) > 1


def test_a_class_with_fewer_gives_all() -> None:
    client = loaded(trial(), "small")  # (2, 3, 2, 2) images
    subset = FM2(top_k=3).subset(client)
    assert subset.labels.tolist() == client.labels.tolist()
    assert client.log == {"chosen_images": 9, "chosen_classes": 4, "classes_below_k": 3}
    everything = loaded(trial(), "large")
    assert len(FM2(top_k="all").subset(everything)) == 13
    assert "classes_below_k" not in everything.log


# ---- the server

V_ENTRIES, EXPERTS = ("tuned.0.weight", "tuned.1.experts.1.w"), tuple(f"{DOMAIN}experts.{e}.w" for e in (0, 1))
ENTRIES = (*V_ENTRIES, f"{DOMAIN}classifier.weight", *EXPERTS)


def reply(client: str, value: float, examples: int, **images: float) -> Reply:
    state = {name: torch.tensor([value, -value]) for name in ENTRIES}
    told = {f"images/{e[1:]}": torch.tensor(n) for e, n in images.items()}
    return Reply(client, Message(named("state", state) | named("statistic", told), {"examples": examples}))


def combined(method: FM2, *replies: Reply) -> list[float]:
    """The first number of every entry, where the server began with 100."""
    server = Server({name: torch.full((2,), 100.0) for name in ENTRIES})
    method.combine(server, "train", iter(replies))
    assert list(server.state) == list(ENTRIES)
    return [float(server.state[name][0]) for name in ENTRIES]


ALL = (30 * 1 + 10 * 2 + 20 * 4) / 60


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FM2(), [ALL, ALL, ALL, (30 * 1 + 10 * 4) / 40, (10 * 2 + 20 * 4) / 30]),
        (FM2(weights="uniform"), [7 / 3, 7 / 3, 7 / 3, (1 + 4) / 2, (2 + 4) / 2]),
        (FM2(aggregation="plain"), [ALL] * 5),
        (FM2(aggregation="plain", weights="uniform"), [7 / 3] * 5),
    ],
)
def test_averages_by_hand(method: FM2, expected: list[float]) -> None:
    """The first client has modality 0, the next 1, the last both; a backbone's own experts are of no modality."""
    told: list[dict[str, float]] = [{"e0": 30.0}, {"e1": 10.0}, {"e0": 10.0, "e1": 20.0}]
    images = told if method.aggregation == "expertwise" else [{}, {}, {}]
    sent = zip("abc", (1.0, 2.0, 4.0), (30, 10, 20), images, strict=True)
    found = combined(method, *(reply(name, value, n, **counts) for name, value, n, counts in sent))
    assert found == pytest.approx(expected)


def test_experts_that_nobody_has_told_of_stay() -> None:
    assert combined(FM2(), reply("a", 1.0, 30, e0=30.0)) == [1.0, 1.0, 1.0, 1.0, 100.0]
    assert combined(FM2(), reply("a", 1.0, 0, e0=30.0)) == [100.0] * 5


def test_a_client_cannot_count_more_than_its_images_nor_less_than_none() -> None:
    found = combined(FM2(), reply("a", 1.0, 10, e0=1e30, e1=-5.0), reply("b", 2.0, 30, e0=30.0, e1=30.0))
    assert found == pytest.approx([1.75, 1.75, 1.75, 1.75, 2.0])


def test_a_round_of_two_clients_of_different_modalities() -> None:
    """Each expert is that of the client that has its modality, to the bit; all else is the mean by 13 and 9 images."""
    made = trial(FM2(), {"large": 1, "small": 0}).run(1)
    sent = {visit.client: visit.up.under("state") for visit in made.visits()}
    for name, tensor in made.history.servers[1].items():
        owner = {f"{DOMAIN}experts.0.": "small", f"{DOMAIN}experts.1.": "large"}.get(name[: len(DOMAIN) + 10])
        if owner is not None:
            assert torch.equal(tensor, sent[owner][name]), name
        elif tensor.is_floating_point():
            torch.testing.assert_close(tensor, (13 * sent["large"][name] + 9 * sent["small"][name]) / 22)
    first = f"{DOMAIN}experts.0.layers.0.weight"
    assert not torch.equal(sent["large"][first], sent["small"][first])


# ---- modalities


def test_steps_know_the_modality_of_their_images() -> None:
    client = loaded(trial(), "large")
    images = trial().federation.client("large").train
    assert client.modality.tolist() == images.modality.tolist()
    inputs = client.inputs.batch(torch.arange(13), None)
    for step in client.steps(1):
        rows = [int((inputs == x).flatten(1).all(1).nonzero()) for x in step.inputs]
        assert step.modality.tolist() == [images.modality[row] for row in rows]
        halves = step.split(2)
        assert torch.equal(torch.cat([half.modality for half in halves]), step.modality)


def test_who_predicts_is_told_the_modality_of_each_batch() -> None:
    client = loaded(trial(), "large")
    seen: list[list[int] | None] = []

    def predict(client: Client, inputs: Tensor) -> Tensor:
        seen.append(None if client.shown is None else client.shown.tolist())
        return torch.zeros(len(inputs), 4)

    logits_in_batches(predict, client, client.inputs, 5, 2, torch.tensor([1, 0, 0, 1, 1]))
    logits_in_batches(predict, client, client.inputs, 3, 2)
    assert seen == [[1, 0], [0, 1], [1], None, None]
    assert client.shown is None


def test_every_part_that_asks_is_told_the_label_counts() -> None:
    model = NETWORKS["resnet4"].model(FM2())
    set_label_counts(model, torch.tensor([2, 0, 0, 7]))
    assert mixtures(model).by_class.own == [0, 3]
    assert model.corrector.counts.tolist() == [2, 0, 0, 7]  # type: ignore[operator]


def test_an_unknown_modality() -> None:
    """All experts alike; or by the nearest mean of the client's own features, where it has any."""
    method = FM2(unknown_modality="clusters", gamma_d=1.0, gamma_c=0.0)
    made = trial(method, {"large": 1, "small": 0})
    client = loaded(made, "large")
    inputs = client.inputs.batch(torch.arange(13), None)
    with torch.no_grad():
        v, domain = client.model.features(inputs), mixtures(client.model).domain
        alike_all = sum(domain.experts[n](v) for n in range(2)) / 2
        torch.testing.assert_close(method.predict(client, inputs), domain.classify(alike_all))
        method.subset(client)  # from now on it knows modality 1, and no other
        torch.testing.assert_close(method.predict(client, inputs), domain(v, torch.ones(13, dtype=torch.int64)))
        torch.testing.assert_close(FM2(gamma_d=1.0, gamma_c=0.0).predict(client, inputs), domain.classify(alike_all))


def test_means_of_features_stay_and_are_of_the_last_backbone() -> None:
    method = FM2(unknown_modality="clusters")
    made = trial(method).run(2)
    last = made.visits("large")[-1]
    assert not [name for name in last.up.under("state") if "clusters" in name]
    kept = last.after["extras.modality_clusters.means"]
    client = loaded(made, "large", state=last.up.under("state"))
    with torch.no_grad():
        v = client.model.features(client.inputs.batch(torch.arange(13), None))
    expected = torch.stack([v[client.modality == kind].mean(0) for kind in range(len(MODALITIES))])
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)


def test_one_modality_is_worth_a_word() -> None:
    model = build_classifier(ModelOptions(backbone="wardround:cnn", pretrained=False), 4, 3, 20, seed=0)
    assert "one modality" in FM2().cautions(model, {})[0]
    assert not FM2(gamma_d=0.0).cautions(model, {})
    assert not FM2().cautions(WHOLE.model(FM2()), {})


# ---- the suite, runs, deployments


def test_variants_conform() -> None:
    method = FM2(
        schedule="sequential", aggregation="plain", routing="prior", unknown_modality="clusters", score="random",
        gate_ce=0.1, top_k=2,
    )  # fmt: skip
    outcome = check_method(method, "resnet4", rounds=2)
    assert {text for text in outcome.values() if text != PASSED} == {
        "not applicable: the method aggregates in its own way"
    }


def test_alone_nothing_travels_and_nobody_predicts_elsewhere() -> None:
    """FM²'s networks without a federation, the second local reference of the paper's generalisation experiment."""
    method = FM2(aggregate=False)
    model = WHOLE.model(method)
    rules = method.rules(model)
    assert not rules.names(Owner.SHARED)
    assert set(rules.names(Owner.LOCAL)) == set(model.state_dict())
    assert not method.statistic_shapes(model, 20, "train")
    assert not method.predicts_alone(model)
    outcome = check_method(method, "resnet4", rounds=2)
    assert PASSED in outcome.values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three sites, each of another modality."""
    out = tmp_path_factory.mktemp("fm2") / "run"
    run(tiny().changed(FAMILIES, "fm2"), out, workers=1)
    return out


def test_two_workers_give_the_bits_of_one(folder: Path, tmp_path: Path) -> None:
    run(tiny().changed(FAMILIES, "fm2"), tmp_path / "two", workers=2)
    assert checkpoint_bytes(tmp_path / "two") == checkpoint_bytes(folder)


def test_a_finished_model_predicts_by_its_clients_modality(folder: Path, tmp_path: Path) -> None:
    """From the folder and from an exported file: the run's own predictions, of the personal and the served model."""
    federation = read_federation(tiny().changed(FAMILIES, "fm2").data, seed=3)
    for number, client in enumerate(federation.clients):
        for which, key in (("personal", "personal"), ("server", "received")):
            trained = load_trained(folder, client.name, which)  # type: ignore[arg-type]
            assert (trained.modality, len(trained.model.modalities)) == (number, 3)
            export(trained, tmp_path / "model.safetensors")
            again = load_exported(tmp_path / "model.safetensors")
            expected = read_predictions(folder, key)[client.name][1]
            order = np.argsort(client.test.names)
            for found in (trained.logits(client.test.images), again.logits(client.test.images)):
                np.testing.assert_allclose(found[order], expected, rtol=1e-3, atol=1e-3)


def test_new_images_at_a_client_with_several_modalities_are_of_an_unknown_one(folder: Path, tmp_path: Path) -> None:
    roster = json.loads((folder / "federation.json").read_text())
    client = roster["clients"][0]
    assert client["modality_counts"] == [sum(client["counts"]["train"]), 0, 0]
    trained, images = load_trained(folder, client["name"]), np.zeros((2, 32, 32, 3), np.uint8)
    known, shown = trained.logits(images), trained.shown(2)
    assert shown is not None
    assert shown.tolist() == [0, 0]
    shutil.copytree(folder, tmp_path / "run")
    for counts in ([5, 7, 0], None):  # None: at the server of a deployment
        client["modality_counts"] = counts
        (tmp_path / "run" / "federation.json").write_text(json.dumps(roster))
        trained = load_trained(tmp_path / "run", client["name"])
        assert trained.shown(2) is None
        assert np.abs(trained.logits(images) - known).max() > 0.01


def test_a_run_goes_on_with_the_modalities_that_it_began_with(folder: Path) -> None:
    federation = read_federation(tiny().changed(FAMILIES, "fm2").data, seed=3)
    other = replace(federation, modalities=("a", "b", "c"))
    with pytest.raises(InputError, match="began with the modalities"):
        run(tiny().changed(FAMILIES | {"rounds": 3}, "fm2"), folder, resume=True, federation=other)


def test_server_and_hospital_have_the_same_experts(tmp_path: Path) -> None:
    """A hospital has one of the modalities that were agreed on, and an expert for each."""
    pytest.importorskip("cryptography", reason="extra `flower` not installed")
    server, first, *_ = founded(tmp_path / "all", tiny().changed(FAMILIES, "fm2"), min_count=0)
    post, hospital = prepare(server, insecure=True), open_hospital(first)
    assert len(hospital.answerer.model.modalities) == 3
    assert hospital.answerer.side.initial_state.keys() == post.side.initial_state.keys()
    assert f"{DOMAIN}experts.2.layers.0.weight" in post.side.initial_state
    assert [*post.side.statistic_shapes("train")] == [*hospital.answerer.side.statistic_shapes("train")]
