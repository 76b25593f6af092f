"""FM²'s mixtures of experts against plain NumPy loops, their published counts, and clusters worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from wardround.federation.rules import Owner, Rules
from wardround.methods.base import FedAvg, Method, ServerSide
from wardround.methods.fedbn import FedBN
from wardround.methods.fedproto import FedProto
from wardround.methods.fedrep import FedRep
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.dual_moe import LAYERS, ClassMoE, DomainMoE, DualMoE, Size, dual_moe
from wardround.models.experts import Expert, MixtureOfExperts, Sizes, expert_of
from wardround.models.modality_clusters import Distance, ModalityClusters
from wardround.models.options import ModelOptions
from wardround.models.routing import Assigned, Gate, RoutingKind, routing_for

SIZES = Sizes(features=5, classes=4, layers=2, width=3)
MODALITIES = 3
V, UNION, FEATURES, KINDS = 513_576, 37, 168, 5  # of the paper: backbone, classes, pooled features, modalities


def images(count: int = 6, features: int = 5) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(count))


def domain(routing: RoutingKind = "hard", sizes: Sizes = SIZES) -> DomainMoE:
    torch.manual_seed(0)
    return DomainMoE(sizes, MODALITIES, routing)


def by_class(counts: Sequence[int] | None = None) -> ClassMoE:
    torch.manual_seed(1)
    experts = ClassMoE(SIZES)
    if counts is not None:
        experts.set_counts(counts)
    return experts


def elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def linear(state: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return state[f"{name}.weight"] @ x + state[f"{name}.bias"]


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z - z.max()) / np.exp(z - z.max()).sum()


def by_hand(moe: MixtureOfExperts, x: Tensor, weights: np.ndarray) -> np.ndarray:
    """Logits `(B, C)`, image by image, expert by expert, layer by layer, in float64."""
    state = {name: tensor.double().numpy() for name, tensor in moe.state_dict().items()}
    rows = []
    for image, shares in zip(x.double().numpy(), weights, strict=True):
        mixture = np.zeros(SIZES.width)
        for n, share in enumerate(shares):
            h = image
            for layer in range(1 + SIZES.layers):
                h = np.maximum(linear(state, f"experts.{n}.layers.{layer}", h), 0)
            mixture += share * h
        rows.append(linear(state, "classifier", mixture))
    return np.stack(rows)


def gate_by_hand(gate: Gate, x: Tensor, extra: np.ndarray) -> np.ndarray:
    """`softmax(A x + a + extra)`, row by row."""
    state = {name: tensor.double().numpy() for name, tensor in gate.linear.state_dict(prefix="A.").items()}
    rows = zip(x.double().numpy(), np.broadcast_to(extra, (len(x), len(gate.present))), strict=True)
    return np.stack([softmax(linear(state, "A", image) + more) for image, more in rows])


def close(found: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


# ---- experts


def test_an_expert_is_a_first_layer_and_l_more() -> None:
    expert = Expert(Sizes(features=168, classes=37, layers=2))
    assert [p.shape for p in expert.parameters() if p.ndim == 2] == [(105, 168), (105, 105), (105, 105)]
    assert elements(expert) == 169 * 105 + 2 * 106 * 105
    assert (expert(images(4, 168)) >= 0).all()


@pytest.mark.parametrize("size", LAYERS)
def test_images_still_differ_behind_the_deepest_expert(size: Size) -> None:
    """By a good part of what came in and of what they share; with torch's own start by 0.4 % of what they share."""
    torch.manual_seed(0)
    x = images(200, 168).abs()
    with torch.no_grad():
        left = Expert(Sizes(168, 37, LAYERS[size]))(x)
    assert left.std(0).mean() > 0.2 * max(x.std(0).mean(), left.mean())


def test_entries_tell_their_expert() -> None:
    names = dual_moe("tiny", 5, 4, MODALITIES, width=3).state_dict()
    assert "domain.experts.2.layers.1.weight" in names
    assert {expert_of(name) for name in names if name.startswith("domain.experts.")} == {0, 1, 2}
    others = {name for name in names if expert_of(name) is None}
    assert {name.split(".")[1] for name in others} == {"classifier", "gate"}
    assert expert_of("experts.12.layers.0.bias") == 12
    assert expert_of("my_experts.1.weight") is None


@given(st.lists(st.integers(0, MODALITIES - 1), min_size=1, max_size=9))
@settings(deadline=None)
def test_dispatching_is_blending_with_one_hot_weights(index: list[int]) -> None:
    moe, x, chosen = domain(), images(len(index)), torch.tensor(index)
    with torch.no_grad():
        torch.testing.assert_close(moe.dispatch(x, chosen), moe.blend(x, moe.routing(x, chosen)))


@pytest.mark.parametrize("index", [[0, 3], [-1, 0]])
def test_an_index_that_is_no_experts_is_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match="experts are 0 to 2, found"):
        domain()(images(2), torch.tensor(index))


# ---- routing


@pytest.mark.parametrize("batch", [1, 6])
def test_hard_routing_by_hand(batch: int) -> None:
    moe, x = domain(), images(batch)
    modality = torch.tensor([2, 0, 2, 1, 0, 2])[:batch]
    close(moe(x, modality), by_hand(moe, x, np.eye(MODALITIES)[modality.numpy()]))


@pytest.mark.parametrize("batch", [1, 6])
def test_soft_routing_by_hand(batch: int) -> None:
    moe, x = domain("soft"), images(batch)
    assert isinstance(moe.routing, Gate)
    expected = by_hand(moe, x, gate_by_hand(moe.routing, x, np.zeros(MODALITIES)))
    close(moe(x), expected)
    assert torch.equal(moe(x, torch.zeros(batch, dtype=torch.int64)), moe(x))


@pytest.mark.parametrize("batch", [1, 6])
def test_prior_routing_by_hand(batch: int) -> None:
    moe, x = domain("prior"), images(batch)
    modality = torch.tensor([2, 0, 2, 1, 0, 2])[:batch]
    assert isinstance(moe.routing, Gate)
    prior = 2 * np.eye(MODALITIES)[modality.numpy()]
    close(moe(x, modality), by_hand(moe, x, gate_by_hand(moe.routing, x, prior)))


def test_without_a_modality_hard_routing_takes_the_mean_and_prior_routing_the_gate() -> None:
    hard, prior, x = domain(), domain("prior"), images()
    close(hard(x), by_hand(hard, x, np.full((len(x), MODALITIES), 1 / 3)))
    assert isinstance(prior.routing, Gate)
    close(prior(x), by_hand(prior, x, gate_by_hand(prior.routing, x, np.zeros(MODALITIES))))


def test_what_has_parameters() -> None:
    assert not list(domain("hard").routing.state_dict())
    assert list(domain("soft").routing.state_dict()) == ["linear.weight", "linear.bias"]
    assert isinstance(routing_for("hard", 5, 3), Assigned)
    assert [routing_for(kind, 5, 3).prior for kind in ("soft", "prior")] == [0.0, 2.0]


@pytest.mark.parametrize(("kind", "trained"), [("hard", {0, 2}), ("soft", {0, 1, 2}), ("prior", {0, 1, 2})])
def test_experts_without_images_get_no_gradient(kind: RoutingKind, trained: set[int]) -> None:
    """None at all under hard routing, so that neither momentum nor weight decay moves them."""
    wide = Sizes(features=5, classes=4, layers=1, width=16)
    moe = domain(kind, wide)
    moe(images(), torch.tensor([0, 2, 2, 0, 0, 2])).square().sum().backward()
    assert {n for n, e in enumerate(moe.experts) if all(p.grad is not None for p in e.parameters())} == trained
    assert {
        n for n, e in enumerate(moe.experts) if any(p.grad is not None and p.grad.any() for p in e.parameters())
    } == trained


def test_an_experts_gradient_is_that_of_its_images_alone() -> None:
    moe, x, modality = domain(), images(), torch.tensor([0, 2, 2, 0, 0, 2])
    moe(x, modality).square().sum().backward()
    together = [p.grad.clone() for p in moe.experts[2].parameters() if p.grad is not None]
    moe.zero_grad()
    moe(x[modality == 2], modality[modality == 2]).square().sum().backward()
    torch.testing.assert_close(together, [p.grad for p in moe.experts[2].parameters()])


# ---- a client's own classes


@pytest.mark.parametrize("batch", [1, 6])
def test_experts_of_absent_classes_count_nothing(batch: int) -> None:
    moe, x = by_class([3, 0, 1, 0]), images(batch)
    weights = gate_by_hand(moe.gate, x, np.array([0, -np.inf, 0, -np.inf]))
    close(moe(x), by_hand(moe, x, weights))
    torch.testing.assert_close(moe.gate(x).sum(1), torch.ones(batch))
    assert moe.own == [0, 2]


def test_experts_of_absent_classes_get_no_gradient() -> None:
    moe = by_class([3, 0, 1, 0])
    moe(images()).square().sum().backward()
    assert [n for n, expert in enumerate(moe.experts) if next(expert.parameters()).grad is not None] == [0, 2]
    grad = moe.gate.linear.weight.grad
    assert grad is not None
    assert grad.isfinite().all()
    assert grad.any(1).tolist() == [True, False, True, False]


def test_a_client_with_one_class_asks_its_expert() -> None:
    moe, x = by_class([0, 0, 7, 0]), images()
    close(moe(x), by_hand(moe, x, np.tile(np.eye(4)[2], (6, 1))))


def test_before_and_without_images_every_expert_runs() -> None:
    moe = by_class([0, 0, 0, 0])
    assert moe.own == by_class().own == [0, 1, 2, 3]
    moe.set_counts([1, 0, 0, 0])
    moe.set_counts(torch.zeros(4, dtype=torch.int64))
    assert torch.equal(moe(images()), by_class()(images()))


def test_who_is_present_is_not_state() -> None:
    """Which classes a client has is its own affair."""
    assert not [name for name in by_class([1, 0, 0, 0]).state_dict() if "present" in name]


@pytest.mark.parametrize("counts", [[1, 2], [[1, 0, 0, 0]]])
def test_a_choice_of_another_shape_is_refused(counts: list[Any]) -> None:
    with pytest.raises(ValueError, match="4 experts, found a choice of shape"):
        by_class(counts)


def test_gate_logits_are_what_a_loss_on_the_gate_takes() -> None:
    moe = by_class([3, 0, 1, 0])
    logits = moe.gate_logits(images())
    assert torch.isneginf(logits).any(0).tolist() == [False, True, False, True]
    torch.testing.assert_close(torch.softmax(logits, 1), moe.gate(images()))


# ---- the pair


def test_the_pair_adds_logits() -> None:
    pair, x, modality = DualMoE(domain(), by_class([1, 1, 0, 0]), 0.3, 0.7), images(), torch.tensor([0, 1, 2, 2, 1, 0])
    torch.testing.assert_close(pair(x, modality), 0.3 * pair.domain(x, modality) + 0.7 * pair.by_class(x))


def test_a_part_that_counts_nothing_does_not_run() -> None:
    x, modality = images(), torch.tensor([0, 1, 2, 2, 1, 0])
    without = DualMoE(domain(), by_class(), 1.0, 0.0)
    assert torch.equal(without(x, modality), without.domain(x, modality))
    without(x, modality).sum().backward()
    assert all(p.grad is None for p in without.by_class.parameters())
    only = DualMoE(domain(), by_class(), 0.0, 1.0)
    assert torch.equal(only(x, modality), only.by_class(x))
    with pytest.raises(ValueError, match="nothing to predict with"):
        DualMoE(domain(), by_class(), 0.0, 0.0)


def test_an_images_logits_do_not_depend_on_the_images_beside_it() -> None:
    x, modality = images(), torch.tensor([0, 2, 2, 1, 0, 2])
    for routing in ("hard", "soft", "prior"):
        pair = DualMoE(domain(routing), by_class([1, 0, 1, 1]))
        singly = [pair(x[i : i + 1], modality[i : i + 1]) for i in range(len(x))]
        torch.testing.assert_close(torch.cat(singly), pair(x, modality))


# ---- published counts


class SharesDomain(FedAvg):
    """The whole backbone and M_d are shared; head and M_c stay."""

    size: Size = "tiny"

    def edit(self, model: Classifier, image_size: int) -> None:
        model.extras["moe"] = dual_moe(self.size, model.head.in_features, model.head.out_features, KINDS)

    def rules(self, model: Classifier) -> Rules:
        moe = model.extras["moe"]
        assert isinstance(moe, DualMoE)
        return super().rules(model).local(model.head, moe.by_class)


def side(method: Method, head: str = "shared") -> ServerSide:
    """A method with ResNet-4 and the 37 classes of the paper's benchmark, every block trained."""
    options = ModelOptions(backbone="wardround:resnet4", pretrained=False, finetune_blocks="all", head=head)  # type: ignore[arg-type]
    model = build_classifier(options, UNION, 3, 28, seed=0)
    method.edit(model, 28)
    return ServerSide(method, model, 28)


@pytest.mark.parametrize(
    ("size", "mixture", "upload"),
    [("tiny", 203_947, 717_523), ("medium", 315_247, 828_823), ("large", 537_847, 1_051_423)],
)
def test_what_fm2_uploads(size: Size, mixture: int, upload: int) -> None:
    """Parameters alone, as the paper counts: a batch norm's running statistics are left out."""
    assert elements(dual_moe(size, FEATURES, UNION, KINDS).domain) == mixture
    counted = side(SharesDomain(size=size)).parameter_elements
    assert counted[Owner.SHARED.value] == upload == V + mixture


@pytest.mark.parametrize(
    ("method", "head", "upload"),
    [(FedAvg(), "shared", 519_829), (FedBN(), "shared", 518_821), (FedRep(), "local", V)],
)
def test_what_others_upload(method: Method, head: str, upload: int) -> None:
    assert side(method, head).parameter_elements[Owner.SHARED.value] == upload


def test_fedproto_uploads_the_features_of_each_class() -> None:
    fedproto = side(FedProto())
    assert fedproto.shared_elements == 0
    assert {tuple(shape) for shape in fedproto.statistic_shapes("train").values()} == {(FEATURES,)}
    assert fedproto.statistic_elements == 6_216 == UNION * FEATURES


def test_a_learned_gate_of_the_domains() -> None:
    """Five rows of 168 weights and a bias."""
    soft = dual_moe("tiny", FEATURES, UNION, KINDS, routing="soft")
    assert elements(soft.domain) == 203_947 + 845


@pytest.mark.parametrize(("size", "layers"), LAYERS.items())
@pytest.mark.parametrize("own", [1, 5, 37])
def test_a_clients_own_experts_are_counted(size: Size, layers: int, own: int) -> None:
    moe = dual_moe(size, FEATURES, UNION, KINDS).by_class
    moe.set_counts([2] * own + [0] * (UNION - own))
    assert moe.own_elements == own * (169 * 105 + layers * 105 * 106) + own * 169 + 106 * 37
    assert (moe.own_elements == elements(moe)) == (own == UNION)


# ---- clusters


def clusters(distance: Distance = "euclidean", momentum: float = 0.75) -> ModalityClusters:
    return ModalityClusters(3, 2, momentum, distance)


def test_means_by_hand() -> None:
    """The first images set a mean; later ones move it by a quarter; a modality that is not there stays."""
    means = clusters()
    means.update(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 8.0]]), torch.tensor([0, 0, 2]))
    assert means.means.tolist() == [[2, 0], [0, 0], [0, 8]]
    means.update(torch.tensor([[6.0, 4.0]]), torch.tensor([0]))
    assert means.means.tolist() == [[3, 1], [0, 0], [0, 8]]
    assert means.images.tolist() == [3, 0, 1]
    assert list(means.state_dict()) == ["means", "images"]


@pytest.mark.parametrize(("distance", "expected"), [("cosine", [0, 2, 2]), ("euclidean", [0, 0, 2])])
def test_the_nearest_mean_by_hand(distance: Distance, expected: list[int]) -> None:
    """(0.1, 1) points to (0, 8) and lies near (2, 0); modality 1, at the origin, has no images and no claim."""
    means = clusters(distance)
    means.update(torch.tensor([[2.0, 0.0], [0.0, 8.0]]), torch.tensor([0, 2]))
    found = means.assign(torch.tensor([[3.0, 1.0], [0.1, 1.0], [-1.0, 6.0]]))
    assert found is not None
    assert found.tolist() == expected


def test_nothing_is_known_before_the_first_image() -> None:
    means = clusters()
    assert means.assign(images(3, 2)) is None
    means.update(images(3, 2))
    assert not means.images.any()


def test_images_of_an_unknown_modality_move_the_nearest_mean() -> None:
    means = clusters()
    means.update(torch.tensor([[2.0, 0.0], [0.0, 8.0]]), torch.tensor([0, 2]))
    means.update(torch.tensor([[0.0, 4.5], [0.0, 7.5]]))
    assert means.means.tolist() == [[2, 0], [0, 0], [0, 7.5]]
    assert means.images.tolist() == [1, 0, 3]


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.just(2)), elements=st.floats(-4, 4, width=16)),
    st.floats(0, 0.9375),
)
def test_a_mean_is_the_weighted_sum_of_its_batches(rows: np.ndarray, momentum: float) -> None:
    """After batches b_1 to b_k: `beta^(k-1) b_1 + (1 - beta) sum_(j>1) beta^(k-j) b_j`."""
    means, k = clusters(momentum=momentum), len(rows)
    for row in torch.from_numpy(rows):
        means.update(row[None], torch.tensor([1]))
    shares = [(1 - momentum if j else 1) * momentum ** (k - 1 - j) for j in range(k)]
    np.testing.assert_allclose(means.means[1], shares @ rows.astype(np.float64), rtol=1e-4, atol=1e-4)


def test_assigned_modalities_route() -> None:
    """Two far groups of features, a mean each: unknown images go through the expert of their group."""
    moe, means = domain(), ModalityClusters(MODALITIES, 5)
    centres = 10 * torch.eye(5)[:MODALITIES]
    means.update(centres, torch.arange(MODALITIES))
    index = torch.tensor([1, 2, 0, 2, 1, 1])
    x = centres[index] + 0.1 * images()
    assert torch.equal(moe(x, means.assign(x)), moe(x, index))
