"""PAFP and PAFP-alt in the loop: what is counted, what travels, what stands still, whose gradient goes where."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from wardround.errors import InputError
from wardround.federation.codecs import PREFIX_BYTES, codec_named, to_json
from wardround.federation.messages import Message, named
from wardround.federation.observers import Observer
from wardround.federation.rules import Owner, Rules
from wardround.methods.alignment import batch_moments
from wardround.methods.base import FedAvg, ServerSide
from wardround.methods.check import NETWORKS
from wardround.methods.pafp import PAFP
from wardround.methods.pafp_alt import PAFPAlt
from wardround.methods.registry import method_from
from wardround.methods.trial import CLASSES, Network, Trial, Visit
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.feature_alignment import insert_alignment
from wardround.models.options import ModelOptions
from wardround.training.client import Client

BN, GN = NETWORKS["bn-cnn"], Network("wardround:cnn-gn", 20, 2, dropout=0.0)
ONE_BATCH = {"one": (1, 1, 1, 1)}


class FedAvgWithFA(FedAvg):
    """Federated averaging of a network with local FA modules: what PAFP is without its alignment loss."""

    variant: Any = "exact"

    def edit(self, model: Classifier, image_size: int) -> None:
        insert_alignment(model, image_size, variant=self.variant)

    def rules(self, model: Classifier) -> Rules:
        return super().rules(model).local(model.before)


def private(visit: Visit) -> set[str]:
    """Local entries that a visit changed."""
    return set(visit.changed & visit.after.keys())


def shared(visit: Visit) -> set[str]:
    """Shared entries that a visit changed."""
    return set(visit.changed & visit.up.under("state").keys())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- counts of the paper


@lru_cache
def paper(image_size: int, **keys: Any) -> tuple[Classifier, ServerSide]:
    """EfficientNet-B0 with features[6..8] tuned and a local 8-way head, as PAFP edits it."""
    method = PAFP(**keys)
    options = ModelOptions(backbone="torchvision:efficientnet_b0", pretrained=False, finetune_blocks=2, head="local")
    model = build_classifier(options, 8, 3, image_size, 0)
    method.edit(model, image_size)
    return model, ServerSide(method, model, image_size)


def test_shared_elements_of_the_paper() -> None:
    _, side = paper(200)
    assert side.shared_elements == 3_181_612
    assert not [name for name in side.initial_state if not name.startswith("tuned.")]


@pytest.mark.parametrize(
    ("size", "reduce", "elements"), [(200, "element", 56_672), (224, "element", 62_720), (200, "channel", 608)]
)
def test_statistic_elements_of_the_paper(size: int, reduce: str, elements: int) -> None:
    assert paper(size, reduce=reduce)[1].statistic_elements == elements


def test_parameters_of_the_alignment_modules() -> None:
    model, side = paper(200)
    assert sum(p.numel() for p in model.before.parameters()) == 50_320
    local = side.rules.names(Owner.LOCAL)
    assert sum(model.state_dict()[name].numel() for name in local) == 50_320 + 10_248


@pytest.mark.parametrize(("codec", "size"), [("float32", 4), ("float16", 2)])
def test_length_of_the_papers_messages(codec: str, size: int) -> None:
    """So many bytes a number, eight a counter; before them the prefix, the scalars and a header of known length."""
    _, side = paper(200)
    zeros = {name: torch.zeros(tuple(shape)) for name, shape in side.statistic_shapes("train").items()}
    scalars = {"examples": 1}
    tensors = named("state", side.initial_state) | named("statistic", zeros)
    frame = codec_named(codec).encode(Message(tensors, scalars))
    start = PREFIX_BYTES + len(to_json(scalars))
    header = int.from_bytes(frame[start : start + 8], "little")
    assert len(frame) == start + 8 + header + size * (3_181_612 - 16 + 56_672) + 8 * 16


def test_measured_traffic_is_the_length_of_the_messages() -> None:
    class Meter(Observer):
        def __init__(self) -> None:
            self.entries: list[dict[tuple[str, str], int]] = []

        def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
            self.entries.append(entries)

    trial = Trial(PAFP(), BN, ["large", "empty"])
    trial.loop.observers = [*trial.loop.observers, meter := Meter()]
    trial.run(1)
    codec = trial.answerer.codec
    down = {(visit.client, "down"): len(visit.frame) for visit in trial.visits()}
    up = {(visit.client, "up"): len(codec.encode(visit.up)) for visit in trial.visits()}
    assert meter.entries[0] == down | up


# ---- where gradients reach


REACH = {0: {"before.0"}, 1: {"before.0", "before.1", "tuned.0"}}


@pytest.mark.parametrize("site", REACH)
def test_gradient_reach(site: int) -> None:
    """Site 1 touches FA1 alone; site 2 FA1, FA2 and features[6]; features[7], features[8] and the head get none."""
    model, _ = paper(200)
    model.before[site].recording = True
    model(torch.randn(2, 112, 4, 4, generator=torch.Generator().manual_seed(0)))
    model.zero_grad(set_to_none=True)
    batch_moments(model.before[site].recorded, "channel").var.sum().backward()
    model.before[site].recording = False
    touched = {".".join(n.split(".")[:2]) for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == REACH[site]


# ---- reductions


@pytest.mark.parametrize("variant", ["exact", "conv_only"])
def test_without_its_loss_pafp_is_fedavg_with_local_modules(variant: Any) -> None:
    ours = Trial(PAFP(strength=0.0, variant=variant), BN).run(3)
    theirs = Trial(FedAvgWithFA(variant=variant), BN).run(3)
    for one, other in zip(ours.visits(), theirs.visits(), strict=True):
        assert same(one.up.under("state"), other.up.under("state"))
        assert same(dict(one.after), dict(other.after))


def test_the_first_round_has_no_target() -> None:
    """The strength then has nothing to act on."""
    weak, strong = (Trial(PAFP(strength=strength), BN, ["large"]).run(2).visits() for strength in (0.0, 10.0))
    assert not weak[0].down.under("target")
    assert same(weak[0].up.under("state"), strong[0].up.under("state"))
    assert not same(weak[1].up.under("state"), strong[1].up.under("state"))
    assert "alignment_loss" not in weak[0].up.scalars["log"]
    assert weak[1].up.scalars["log"]["alignment_loss"] > 0
    assert weak[1].up.scalars["log"]["alignment_gradient_ratio"] == 0
    assert strong[1].up.scalars["log"]["alignment_gradient_ratio"] > 0


def test_uploaded_moments_are_those_of_the_batch() -> None:
    """With an FA module that starts as the identity and one batch, the moments are those of the frozen features."""
    trial = Trial(PAFP(variant="conv_only"), GN, ONE_BATCH).run(1)
    h = trial.answerer.client_inputs("one", "train").batch(torch.arange(4), None)
    statistics = trial.visits()[0].up.under("statistic")
    torch.testing.assert_close(statistics["0/mean"], h.mean(0))
    torch.testing.assert_close(statistics["0/var"], h.var(0, correction=0))


def test_the_target_is_the_clients_average_and_then_follows() -> None:
    trial = Trial(PAFP(m_srv=0.25), BN, ["large", "small", "empty"]).run(3)
    rounds = []
    for round in (1, 2):
        uploads = [(v.up.scalars["examples"], v.up.under("statistic")["0/mean"]) for v in trial.visits(round=round)]
        rounds.append(sum(n * mean for n, mean in uploads) / sum(n for n, _ in uploads))
    received = [trial.visits("small", round)[0].down.under("target") for round in (1, 2, 3)]
    assert received[0] == {}
    torch.testing.assert_close(received[1]["0/mean"], rounds[0])
    torch.testing.assert_close(received[2]["0/mean"], 0.75 * rounds[0] + 0.25 * rounds[1])
    assert trial.history.logs[0].keys() == {"statistic_distance/0", "statistic_distance/1"}


def test_alignment_aligns() -> None:
    """With the loss, the clients' statistics lie closer together after some rounds than without.

    One batch a client: moments of small batches differ more by chance than the clients do.
    """
    keys = {"batch_size": 16, "local_epochs": 3}
    far = []
    for strength in (0.0, 10.0):
        method = PAFP(strength=strength, m_loc=1.0, m_srv=1.0, reduce="channel")
        trial = Trial(method, GN, ["large", "small"], **keys).run(8)
        far.append([log["statistic_distance/0"] for log in trial.history.logs])
    assert far[0][0] == pytest.approx(far[1][0])
    assert far[1][-1] < 0.75 * far[0][-1]


def test_nothing_of_theta_travels() -> None:
    for visit in Trial(PAFP(), Network("wardround:cnn-bn", 20, 2, logit_corrector="affine")).run(2).visits():
        for message in (visit.down, visit.up):
            names = set(message.under("state"))
            assert names
            assert not [n for n in names if n.startswith(("before.", "head.", "corrector.", "frozen."))]


# ---- learning rates and clipping


def test_theta_may_have_its_own_learning_rate() -> None:
    """One step of plain SGD: theta moves twice as far at twice the rate, phi as before."""
    keys = {"weight_decay": 0.0, "clip_norm": None, "lr": 0.01, "lr_decay": 0.5}
    plain, faster = (Trial(PAFP(lr_local=lr), GN, ONE_BATCH, **keys).run(1).visits()[0] for lr in (None, 0.02))
    assert same(plain.up.under("state"), faster.up.under("state"))
    for name, start in plain.before.items():
        torch.testing.assert_close(faster.after[name] - start, 2 * (plain.after[name] - start), rtol=1e-3, atol=3e-7)


def test_the_local_rate_decays_like_the_other() -> None:
    client = Trial(PAFP(lr_local=0.2), GN, ONE_BATCH, lr_decay=0.5).answerer.load(
        "one", Message({}, {"round": 3, "phase": "train"})
    )
    method = PAFP(lr_local=0.2)
    groups = method.optimizer(client, method.parameters(client)).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.05 / 4, 0.2 / 4])
    trained = {id(p) for p in method.parameters(client)}
    assert sum(len(group["params"]) for group in groups) == len(trained)


# ---- PAFP-alt, exclusive


def test_exclusive_rounds_leave_the_idle_group_alone() -> None:
    """Bit for bit, buffers and counters of the shared batch norms included; moments are uploaded every round."""
    trial = Trial(PAFPAlt(every=2), BN).run(4)
    for visit in trial.visits():
        trains = visit.up.scalars["examples"] > 0
        if visit.round % 2:
            assert bool(shared(visit)) == trains
            assert not private(visit)
        else:
            assert bool(private(visit)) == trains
            assert not shared(visit)
        assert all(bool(t.any()) == trains for n, t in visit.up.under("statistic").items() if n.endswith("mean"))
    start, *_ = servers = trial.history.servers
    assert same(dict(servers[1]), dict(servers[2]))
    assert not same(dict(start), dict(servers[1]))


def test_every_third_round_is_local() -> None:
    visits = Trial(PAFPAlt(every=3), BN, ["small"]).run(3).visits()
    assert [bool(private(visit)) for visit in visits] == [False, False, True]


def test_drift_lets_shared_statistics_move_in_local_rounds() -> None:
    local_round = Trial(PAFPAlt(drift=True), BN, ["small"]).run(2).visits()[1]
    assert shared(local_round) == {f"tuned.0.1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("schedule", ["exclusive", "additive"])
def test_head_always(schedule: Any) -> None:
    visits = Trial(PAFPAlt(head_always=True, schedule=schedule), BN, ["small"]).run(2).visits()
    assert private(visits[0]) == {"head.weight", "head.bias"}
    assert private(visits[1]) == set(visits[1].after)


def test_a_shared_head_trains_with_phi() -> None:
    network = Network("wardround:cnn-bn", 20, 2, head="shared")
    first, second = Trial(PAFPAlt(head_always=True), network, ["small"]).run(2).visits()
    assert {"head.weight", "head.bias"} <= shared(first)
    assert not shared(second)


def test_local_rounds_minimise_the_joint_loss() -> None:
    """theta's step in a local round depends on lambda; phi's in the next does not directly."""
    weak, strong = (Trial(PAFPAlt(strength=s), BN, ["small"]).run(2).visits() for s in (0.0, 5.0))
    assert same(dict(weak[0].up.tensors), dict(strong[0].up.tensors))
    assert not same(dict(weak[1].after), dict(strong[1].after))


def test_an_exclusive_schedule_needs_two_kinds_of_round() -> None:
    with pytest.raises(InputError, match="every = 1 would never train the shared parameters"):
        method_from({"name": "pafp-alt", "every": 1})
    assert method_from({"name": "pafp-alt", "every": 1, "schedule": "additive"})


# ---- PAFP-alt, additive


@pytest.mark.parametrize("strength", [0.1, 1e4])
def test_the_alignment_loss_does_not_reach_phi(strength: float) -> None:
    """To the bit: neither as a gradient nor through the clipping of a norm that it dominates."""
    ours = Trial(PAFPAlt(strength=strength, schedule="additive", every=1), BN, ONE_BATCH).run(2).visits()[1]
    theirs = Trial(FedAvgWithFA(), BN, ONE_BATCH).run(2).visits()[1]
    assert same(dict(ours.before), dict(theirs.before))
    assert same(ours.up.under("state"), theirs.up.under("state"))
    assert not same(dict(ours.after), dict(theirs.after))
    joint = Trial(PAFP(strength=strength), BN, ONE_BATCH).run(2).visits()[1]
    assert not same(joint.up.under("state"), theirs.up.under("state"))


def test_theta_gets_the_joint_gradient() -> None:
    """The same step as PAFP's for theta, up to the order of a sum."""
    keys = {"clip_norm": None, "lr": 1e-3}
    ours = Trial(PAFPAlt(strength=0.5, schedule="additive", every=1), BN, ONE_BATCH, **keys).run(2).visits()[1]
    joint = Trial(PAFP(strength=0.5), BN, ONE_BATCH, **keys).run(2).visits()[1]
    for name, tensor in joint.after.items():
        torch.testing.assert_close(ours.after[name], tensor, rtol=1e-5, atol=1e-7)


def test_additive_trains_phi_always_and_theta_at_times() -> None:
    visits = Trial(PAFPAlt(schedule="additive", every=2), BN, ["small"]).run(2).visits()
    assert [bool(shared(visit)) for visit in visits] == [True, True]
    assert [bool(private(visit)) for visit in visits] == [False, True]


# ---- extremes and mistakes


@pytest.mark.parametrize("method", [PAFP(m_loc=1.0), PAFPAlt(), PAFPAlt(schedule="additive", every=1)])
def test_one_image_and_an_absent_class_are_finite(method: PAFP) -> None:
    trial = Trial(method, BN, {"one": (0, 1, 0, 0), "two": (0, 0, 2, 0)}, batch_size=1, class_weights="raw").run(4)
    for visit in trial.visits():
        assert math.isfinite(visit.up.scalars["loss"])
        assert all(torch.isfinite(tensor).all() for tensor in [*visit.after.values(), *visit.up.tensors.values()])


def test_without_tuned_blocks_there_is_nothing_to_align() -> None:
    with pytest.raises(InputError, match=r"finetune_blocks = 0: PAFP aligns .*allowed: 1 and more"):
        Network("wardround:cnn-bn", 20, 0).model(PAFP())


def test_few_images_behind_statistics_are_warned_of() -> None:
    (caution,) = PAFP().cautions(BN.model(PAFP()), {"tiny": 12, "large": 500, "empty": 0})
    assert "tiny (12)" in caution
    assert "large" not in caution
    assert not PAFP(reduce="channel").cautions(BN.model(PAFP()), {"tiny": 12})


@pytest.mark.parametrize(
    "keys",
    [
        {"variant": "gated", "statistic": "pre_activation"},
        {"variant": "delta", "reduce": "channel", "divergence": "reverse_kl"},
        {"divergence": "moments", "site_weights": "deeper", "variance": "total"},
        {"divergence": "fdse_released", "m_srv": 1.0},
    ],
)
def test_every_switch_runs(keys: dict[str, Any]) -> None:
    trial = Trial(PAFP(**keys), BN, ["large", "small"]).run(3)
    assert all("alignment_loss" in visit.up.scalars["log"] for visit in trial.visits(round=3))


# ---- the logit corrector in the loop


@pytest.mark.parametrize("kind", ["affine", "prior", "fedlc", "posthoc"])
def test_the_corrector_knows_its_own_client(kind: Any) -> None:
    """Counts change hands with the model, and what is learned stays at its client."""
    seen: dict[str, list[float]] = {}

    class Spy(FedAvg):
        def train(self, client: Client, phase: str) -> float:
            seen[client.name] = client.model.corrector.counts.tolist()  # type: ignore[union-attr, operator]
            return super().train(client, phase)

    trial = Trial(Spy(), Network("wardround:cnn-bn", 20, 2, logit_corrector=kind)).run(2)
    assert seen == {"large": [5, 4, 4, 0], "small": [2, 3, 2, 2], "single": [0, 0, 1, 0]}
    learned = {n for n in trial.visits("large")[-1].after if n.startswith("corrector.")}
    assert learned == {"affine": {"corrector.scale", "corrector.bias"}, "prior": {"corrector.bias"}}.get(kind, set())
    for name in learned:
        assert not torch.equal(trial.visits("large")[-1].after[name], trial.visits("small")[-1].after[name])


def test_a_posthoc_corrector_acts_on_predictions_alone() -> None:
    plain = Trial(FedAvg(), GN, ["large"]).run(1)
    corrected = Trial(
        FedAvg(), Network("wardround:cnn-gn", 20, 2, dropout=0.0, logit_corrector="posthoc"), ["large"]
    ).run(1)
    assert same(plain.visits()[0].up.under("state"), corrected.visits()[0].up.under("state"))
    images = plain.federation.client("large").test
    found = []
    for trial in (plain, corrected):
        client = trial.answerer.load("large", trial.visits()[0].down)
        found.append(torch.from_numpy(trial.answerer.logits(client, "test", images)))
    prior = (torch.tensor([5.0, 4, 4, 0]) + 1) / (13 + CLASSES)
    torch.testing.assert_close(found[1], found[0] - prior.log())


def test_a_prior_corrector_changes_training() -> None:
    """Its loss is the balanced softmax with smoothed counts; checked on the first step's loss."""
    network = Network("wardround:cnn-gn", 20, 2, dropout=0.0, logit_corrector="prior")
    trial = Trial(FedAvg(), network, ONE_BATCH | {"skewed": (3, 1, 0, 0)}, loss="cross-entropy", class_weights="none")
    trial.run(1)
    visit = trial.visits("skewed")[0]
    client = trial.answerer.load("skewed", visit.down)
    trial.model.load_state_dict(dict(visit.before) | visit.down.under("state"), strict=False)
    with torch.no_grad():
        logits = trial.model(client.inputs.batch(torch.arange(4), None))
    prior = (torch.tensor([3.0, 1, 0, 0]) + 1) / (4 + CLASSES)
    assert visit.up.scalars["loss"] == pytest.approx(
        functional.cross_entropy(logits + prior.log(), client.labels).item(), rel=1e-4
    )
