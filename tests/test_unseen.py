"""A modality out of the federation, a few of its images for later, and with what a network then begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiment_fixtures import tiny
from wardround.data import ClientData, Federation
from wardround.data.federation import samples
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.experiment import build_model
from wardround.methods.fm2 import DOMAIN, mixtures
from wardround.unseen import SITE, chosen_modalities, few_images, without_modality
from wardround.unseen_transfer import start_of, with_appended_expert

KINDS = ("ct", "mri", "xray")
CLASSES = ("a", "b", "c", "never")


def part(*rows: tuple[int, int], mark: int = 0) -> Any:
    """Samples of (class, modality), every image filled with 100 `mark` + 10 class + modality."""
    images = np.array([[[[100 * mark + 10 * label + kind]]] for label, kind in rows], np.uint8).reshape(-1, 1, 1, 1)
    names = [f"{mark}/{n}/{label}{kind}" for n, (label, kind) in enumerate(rows)]
    return samples(images, [label for label, _ in rows], names, [kind for _, kind in rows])


def site(name: str, train: Any, test: Any) -> ClientData:
    return ClientData(name, train, train.take([]), test)


def federation() -> Federation:
    """mri shows b and c, and c alone; "only" has nothing else, and nobody has ever shown the last class."""
    mixed = site("mixed", part((0, 0), (1, 1), (1, 2), (2, 1)), part((0, 0), (2, 1), mark=1))
    only = site("only", part((2, 1), (2, 1), mark=2), part((1, 1), mark=2))
    return Federation((mixed, only), CLASSES, "made up", KINDS)


# ---- out of the federation


def test_its_images_clients_and_classes_leave() -> None:
    """c was mri's alone; what nobody showed before is no loss of ours. Later modalities move up."""
    left = without_modality(federation(), "mri")
    assert left.names == ("mixed",)
    assert left.modalities == ("ct", "xray")
    assert left.classes == ("a", "b", "never")
    train, test = left.clients[0].train, left.clients[0].test
    assert train.images.ravel().tolist() == [0, 12]
    assert (train.labels.tolist(), train.modality.tolist()) == ([0, 1], [0, 1])
    assert test.images.ravel().tolist() == [100]
    assert train.names == ("0/0/00", "0/2/12")


def test_held_out_sites_lose_it_too() -> None:
    whole = federation()
    apart = site("apart", part(), part((1, 1), (0, 2), mark=2))
    gone = site("gone", part(), part((1, 1), mark=2))
    left = without_modality(Federation((whole.clients[0],), CLASSES, "made up", KINDS, (), (apart, gone)), "mri")
    assert [(held.name, held.test.images.ravel().tolist()) for held in left.held_out] == [("apart", [202])]


@pytest.mark.parametrize("name", ["dermoscopy", "fundus", "xray"])
def test_phantoms_of_several_families(name: str) -> None:
    """A family a client: the others stay as they are, and class by class nothing is lost but the family's own."""
    whole = read_federation(tiny(data__phantoms__family="mixed").data, 3)
    left = without_modality(whole, name)
    assert len(left.clients) == 2
    assert set(whole.classes) - set(left.classes) == {c for c in whole.classes if c.startswith(f"{name}:")}
    for client in left.clients:
        before = whole.client(client.name).train
        assert np.array_equal(client.train.images, before.images)
        assert [left.classes[c] for c in client.train.labels] == [whole.classes[c] for c in before.labels]
        assert {left.modalities[m] for m in client.train.modality} == {whole.modalities[m] for m in before.modality}


def test_a_set_of_mimh(tmp_path: Path) -> None:
    """Nobody else has its seven classes; classes of sets that are not in use stay in the space of 37."""
    mimh = pytest.importorskip("test_data_mimh")
    whole = mimh.read(mimh.made(tmp_path), {"sets": ["retinamnist", "pathmnist", "dermamnist"]})
    left = without_modality(whole, "dermatoscope")
    assert (left.modalities, len(left.classes)) == (("fundus", "colon pathology"), 30)
    assert left.names == ("retinamnist", "pathmnist")
    few = few_images(whole, "dermatoscope", 0.5, 0)
    assert few.federation.classes == whole.classes[30:]
    assert few.client.train.counts(7).tolist() == [3] * 7
    assert len(few.client.test) == 14


def test_names_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"--leave-out pet: made up has no such modality \(it has ct, mri, xray\)"):
        chosen_modalities(federation(), ["mri", "pet"])


def test_a_modality_must_leave_and_give_something() -> None:
    """xray is never tested; with one modality there is nothing to leave out."""
    with pytest.raises(InputError, match="--leave-out xray: no client of made up has a test image"):
        chosen_modalities(federation(), [])
    assert chosen_modalities(federation(), ["mri", "ct", "mri"]) == ("mri", "ct")
    with pytest.raises(InputError, match="of one modality"):
        chosen_modalities(Federation((site("s", part((0, 0)), part((0, 0), mark=1)),), CLASSES, "made up"), [])
    alone = site("s", part((0, 0)), part((0, 0), (0, 1), mark=1))
    with pytest.raises(InputError, match="training image of another"):
        chosen_modalities(Federation((alone,), CLASSES, "made up", ("ct", "mri")), ["ct"])


# ---- a few of them


def large() -> Federation:
    """190, 40 and 3 training images of xray at two clients, among 50 of ct."""
    rows = [(0, 2)] * 190 + [(1, 2)] * 40 + [(2, 2)] * 3 + [(0, 0)] * 50
    first, second = part(*rows[::2]), part(*rows[1::2], mark=1)
    return Federation(
        (site("one", first, part((0, 2), (3, 2), mark=2)), site("two", second, part((1, 2), (0, 0), mark=2))),
        CLASSES, "made up", KINDS,
    )  # fmt: skip


@pytest.mark.parametrize(("fraction", "counts"), [(0.05, [8, 3, 1, 0]), (0.001, [1, 1, 1, 0]), (1.0, [190, 40, 3, 0])])
def test_a_share_keeps_proportions_and_every_class(fraction: float, counts: list[int]) -> None:
    """5 % of 233 are 12: one of each class that is trained, and of 9 more 7.40, 1.53 and 0.08, by largest remainder.

    The last class is only tested, and stays in the label space.
    """
    few = few_images(large(), "xray", fraction, 0)
    assert few.client.train.counts(4).tolist() == counts
    assert few.pool.tolist() == [190, 40, 3, 0]
    assert few.federation.classes == CLASSES
    assert few.client.test.counts(4).tolist() == [1, 1, 0, 1]


def test_the_choice_depends_on_the_seed_alone() -> None:
    names = [few_images(large(), "xray", 0.1, seed).client.train.names for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]


def test_the_new_modality_comes_last() -> None:
    """Only its images are there, told as of the expert after those that the federation has."""
    few = few_images(federation(), "mri", 1.0, 0)
    assert few.federation.modalities == ("ct", "xray", "mri")
    assert few.federation.classes == ("b", "c")
    assert few.federation.names == (SITE,)
    train = few.client.train
    assert sorted(train.images.ravel().tolist()) == [11, 21, 221, 221]
    assert set(train.modality.tolist()) == {2}
    assert [(x - 1) // 10 % 10 - 1 for x in train.images.ravel().tolist()] == train.labels.tolist()


# ---- where a network begins


def networks(routing: str) -> tuple[Any, Any]:
    """FM²'s networks for two modalities and three classes, and for one modality more and two other classes."""
    experiment = tiny(
        data__phantoms__family="mixed", model__finetune_blocks="all", method__name="fm2", method__routing=routing
    )
    return build_model(experiment, 3, KINDS[:2])[1], build_model(experiment, 2, KINDS)[1]


@pytest.mark.parametrize("routing", ["hard", "soft"])
def test_the_appended_expert_is_the_mean(routing: str) -> None:
    """Of every layer; the others, V and the gate's rows are the federation's, everything about classes is fresh."""
    old, new = networks(routing)
    for number, tensor in enumerate(old.state_dict().values()):
        tensor.add_(0.01 * number + 0.01 if tensor.is_floating_point() else 1)
    fresh = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    start = start_of(old.state_dict(), new)
    new.load_state_dict(start, strict=False)
    before, after = mixtures(old).domain, mixtures(new).domain
    for layer in range(3):
        for kind in ("weight", "bias"):
            first, second, last = (after.experts[n].get_parameter(f"layers.{layer}.{kind}") for n in range(3))
            assert torch.equal(first, before.experts[0].get_parameter(f"layers.{layer}.{kind}"))
            torch.testing.assert_close(last, (first + second) / 2)
    for name, tensor in new.state_dict().items():
        anew = name.startswith(("head.", "extras.mixtures.by_class.", f"{DOMAIN}classifier."))
        assert torch.equal(tensor, fresh[name]) == anew, name
        assert (name in start) == (not anew), name


def test_a_gate_gets_the_mean_of_its_rows() -> None:
    old, _ = networks("prior")
    gate = old.state_dict()[f"{DOMAIN}routing.linear.weight"]
    grown = with_appended_expert(old.state_dict())[f"{DOMAIN}routing.linear.weight"]
    assert torch.equal(grown[:2], gate)
    torch.testing.assert_close(grown[2], (gate[0] + gate[1]) / 2)


def test_another_network_begins_with_its_backbone() -> None:
    experiment = tiny(model__finetune_blocks="all")
    old, new = build_model(experiment, 3)[1], build_model(experiment, 5)[1]
    assert set(start_of(old.state_dict(), new)) == {n for n in new.state_dict() if not n.startswith("head.")}
