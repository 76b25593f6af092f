"""What a study is: declared systems around an experiment of the user's, on one federation or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from wardround.errors import InputError
from wardround.systems import as_folder

Changes = Mapping[str, Any]
"""Dotted keys of an experiment file, and the values that they get."""

IID_ALPHA = 1e6
"""Dirichlet shares at this concentration are equal to a thousandth: every client gets the same of every class."""


@dataclass(frozen=True)
class Axis:
    """One way in which the parts of a study differ: a name, and by label what each choice changes."""

    name: str
    choices: Mapping[str, Changes]


@dataclass(frozen=True)
class Part:
    """One comparison of a study, on a federation of its own. The label of a study's only part is empty."""

    label: str
    changes: Changes

    @property
    def folder_name(self) -> str:
        """The label as a folder's name."""
        return as_folder(self.label)


@dataclass(frozen=True)
class Study:
    """A declared set of systems around an experiment.

    Attributes:
        name: on the command line.
        title: of its table.
        question: what it answers, in a sentence.
        source: the paper that it is taken from.
        method: the method that all its systems are; None for whatever the experiment or `--methods` names.
        systems: by label what each changes; empty for those that the experiment or `--methods` names.
        axes: every combination of their choices is a part, a comparison on a federation of its own.
        reference: label of the system that the others are compared with; None for the best.
        uncoded: label of the system whose messages are not coded: the others' bytes are shown beside its own.
        needs_held_out: whether it asks for a site that never trains.
        equal_epochs: whether every system has as many rounds as make the reference's local epochs, where methods differ
            in how often a round passes over the images.
        captions: providers of captions of which the experiment must name one; empty where the study asks for none.
    """

    name: str
    title: str
    question: str
    source: str
    method: str | None = None
    systems: Mapping[str, Changes] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    reference: str | None = None
    uncoded: str | None = None
    needs_held_out: bool = False
    equal_epochs: bool = False
    captions: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The comparisons that it consists of, one where it has no axes."""
        combined = product(*(axis.choices.items() for axis in self.axes))
        return tuple(
            Part(" / ".join(label for label, _ in one), _merged(changes for _, changes in one)) for one in combined
        )

    def with_clients(self, numbers: Sequence[int]) -> Study:
        """This study at other numbers of clients.

        Raises:
            InputError: it does not vary them.
        """
        names = [axis.name for axis in self.axes]
        if "clients" not in names:
            raise InputError(f"--clients: the study {self.name} does not vary the number of clients")
        axes = [clients_axis(numbers) if axis.name == "clients" else axis for axis in self.axes]
        return replace(self, axes=tuple(axes))


def _merged(changes: Iterable[Changes]) -> dict[str, Any]:
    return {key: value for one in changes for key, value in one.items()}


def clients_axis(numbers: Sequence[int]) -> Axis:
    """The images dealt to so many clients."""
    return Axis("clients", {f"{number} clients": {"data.partition.clients": number} for number in numbers})


def partition_axis() -> Axis:
    """Every client with the same mixture of classes, and class-wise Dirichlet shares of concentration 0.5."""
    key = "data.partition"
    dealt = {"IID": IID_ALPHA, "Dirichlet 0.5": 0.5}
    return Axis("partition", {label: {f"{key}.kind": "dirichlet", f"{key}.alpha": a} for label, a in dealt.items()})
