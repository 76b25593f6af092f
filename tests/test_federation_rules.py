"""Rules select by object and type, so that a name can neither hide an entry nor catch a wrong one."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from wardround.federation.messages import BadMessage
from wardround.federation.rules import BATCH_NORMS, Owner, Rules, modules_of_type


def skeleton(name: str) -> nn.Module:
    """A torchvision network without weights."""
    import torchvision

    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None)


def norm_entries(model: nn.Module) -> set[str]:
    """The entries that sit directly in a batch norm, found from their own names upwards."""
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in model.state_dict()}
    return {name for name, parent in parents.items() if isinstance(parent, nn.BatchNorm2d)}


@pytest.mark.parametrize(("name", "entries"), [("resnet18", 100), ("densenet121", 605), ("efficientnet_b0", 245)])
def test_batch_norms_by_type_are_all_of_them_and_nothing_else(name: str, entries: int) -> None:
    """FedBN in some libraries shares 95 of ResNet-18's 100 entries, as it looks for a name or drops a prefix."""
    model = skeleton(name)
    norms = modules_of_type(model, BATCH_NORMS)
    rules = Rules.of(model).local(*norms)
    local = rules.names(Owner.LOCAL)
    assert len(local) == entries == 5 * len(norms)
    assert set(local) == norm_entries(model)
    assert set(rules.names(Owner.SHARED)) == model.state_dict().keys() - set(local)


def test_nothing_in_efficientnet_is_called_bn() -> None:
    """Why the rule above cannot be written with names."""
    assert not [name for name in skeleton("efficientnet_b0").state_dict() if "bn" in name]


def test_everything_is_shared_at_first_buffers_included() -> None:
    """FedAvg in some libraries leaves the 60 buffers of ResNet-18 at home."""
    model = skeleton("resnet18")
    shared = Rules.of(model).names(Owner.SHARED)
    assert shared == tuple(model.state_dict())
    assert len(shared) == 122
    assert len([name for name in shared if "running_" in name or "num_batches" in name]) == 60


class Numbered(nn.Module):
    """Modules whose names start alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(2, 2)
        self.layer10 = nn.Linear(2, 2)
        self.layer1_extra = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(1))


def test_prefixes_are_whole_names() -> None:
    model = Numbered()
    assert Rules.of(model).local(model.layer1).names(Owner.LOCAL) == ("layer1.weight", "layer1.bias")


def test_later_rules_win_over_earlier_ones() -> None:
    model = Numbered()
    rules = Rules.of(model).frozen(model.body).local(model.body[0]).shared(model.body[0][0])
    assert rules.names(Owner.FROZEN) == ("body.1.weight", "body.1.bias")
    assert rules.names(Owner.LOCAL) == ()
    assert "body.0.0.running_mean" in rules.names(Owner.SHARED)


def test_the_whole_model_includes_what_is_directly_in_it() -> None:
    model = Numbered()
    assert Rules.of(model).local(model).names(Owner.LOCAL) == tuple(model.state_dict())


def test_a_module_that_stands_in_two_places_has_one_owner() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    model["tied"] = model["head"]
    local = Rules.of(model).local(model["head"]).names(Owner.LOCAL)
    assert set(local) == {"head.weight", "head.bias", "tied.weight", "tied.bias"}


def test_foreign_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear is not part of the model"):
        Rules.of(Numbered()).local(Numbered().layer1)


def test_rules_survive_the_way_into_another_process() -> None:
    model = Numbered()
    there, rules = pickle.loads(pickle.dumps((model, Rules.of(model))))
    assert rules.local(there.layer10).names(Owner.LOCAL) == ("layer10.weight", "layer10.bias")


def test_picking_copies_nothing_and_keeps_the_order() -> None:
    model = Numbered()
    state = model.state_dict()
    picked = Rules.of(model).local(model.layer10).pick(state, Owner.LOCAL)
    assert list(picked) == ["layer10.weight", "layer10.bias"]
    assert picked["layer10.weight"] is state["layer10.weight"]


@pytest.mark.parametrize(
    ("owned", "name", "says"),
    [
        (lambda r, m: r.local(m.layer1), "layer1.bias", "'layer1.bias' is local and may not travel"),
        (lambda r, m: r.frozen(m.layer1), "layer1.bias", "'layer1.bias' is frozen and may not travel"),
        (lambda r, m: r, "layer2.bias", "'layer2.bias' is unknown and may not travel"),
    ],
)
def test_a_leak_is_an_error(owned: Callable[[Rules, Numbered], Rules], name: str, says: str) -> None:
    model = Numbered()
    rules = owned(Rules.of(model), model)
    rules.refuse_private(["layer10.weight", "scale"])
    with pytest.raises(BadMessage, match=says):
        rules.refuse_private(["layer10.weight", name])
