"""Local epochs: what methods say of their passes is what they do, and budgets and curves count by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from wardround.methods.base import Method
from wardround.methods.check import NETWORKS
from wardround.methods.ditto import Ditto
from wardround.methods.fedco2 import FedCO2
from wardround.methods.fedrep import FedRep
from wardround.methods.fm2 import FM2
from wardround.methods.local_epochs import LocalEpochs, recorded_epochs
from wardround.methods.registry import METHODS
from wardround.methods.trial import Trial
from wardround.training.client import Client, Step
from wardround.training.options import TrainingOptions

TWO = TrainingOptions(local_epochs=2)
VARIANTS: dict[str, Method] = {
    **{name: kind() for name, kind in METHODS.items() if not kind.needs_text},
    "fm2 interleaved": FM2(schedule="interleaved"),
    "fm2 sequential": FM2(schedule="sequential"),
    "ditto 3": Ditto(epochs=3),
    "fedrep halves": FedRep(schedule="halves"),
    "fedco2 without distillation": FedCO2(distil=False),
    "clip-zeroshot": METHODS["clip-zeroshot"](),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_methods_pass_as_often_as_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first rounds of a trial; in the last one, personal models may be trained further."""
    network = NETWORKS["encoder" if VARIANTS[name].needs_text else "vit-tiny" if name == "fedlora" else "resnet4"]
    done: Counter[int] = Counter()
    steps = Client.steps

    def counted(client: Client, epochs: int, *rest: Any, **more: Any) -> Iterator[Step]:
        done[client.round] += epochs
        return steps(client, epochs, *rest, **more)

    monkeypatch.setattr(Client, "steps", counted)
    head = "shared" if name == "ccvr" else network.head
    made = Trial(VARIANTS[name], replace(network, head=head), ["large"], local_epochs=2).run(3)
    assert made.options.local_epochs == 2
    assert [done[round] for round in (1, 2)] == [VARIANTS[name].passes(TWO, round) for round in (1, 2)]


def test_a_fused_round_counts_twice() -> None:
    assert [LocalEpochs(FM2(), TWO).until(round) for round in (0, 1, 3)] == [0, 4, 12]
    assert LocalEpochs(FM2(schedule="sequential"), TWO).until(3) == 6


def test_rounds_for_a_budget() -> None:
    """At least the budget; none for a method that never passes."""
    one = TrainingOptions()
    assert [LocalEpochs(FM2(), one).rounds_for(epochs) for epochs in (0, 7, 8)] == [0, 4, 4]
    assert LocalEpochs(FedCO2(), one).rounds_for(10) == 3  # 2, then 4 each: 2, 6, 10
    assert LocalEpochs(METHODS["clip-zeroshot"](), one).rounds_for(1) is None


def test_epochs_of_a_recorded_run() -> None:
    """From its file; a method of somebody else, or with other keys, counts its local epochs."""
    fm2: dict[str, Any] = {"method": {"name": "fm2", "size": "tiny"}, "training": {"local_epochs": 3}}
    assert recorded_epochs(fm2).until(2) == 12
    assert recorded_epochs(fm2 | {"method": {"name": "fm2", "forgotten": 1}}).until(2) == 6
    assert recorded_epochs(fm2 | {"method": {"name": "of-mine"}}).until(2) == 6
    assert recorded_epochs({}).until(2) == 2
