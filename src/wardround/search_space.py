"""What `wardround tune` may try: the lists of values in `[tune]`, and combinations of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wardround.config import Experiment, dotted
from wardround.errors import InputError, suggestion
from wardround.methods.registry import METHODS, PRESETS, kind_of

SECTIONS = ("training", "model", "method")
_UNEQUAL = ("training.local_epochs",)  # a trial with more of it would see more images
_EXAMPLE = "[tune.training] lr = [0.01, 0.1]"

Combination = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class SearchSpace:
    """A list of values for each dotted key, such as `method.mu`, and so a grid of combinations.

    >>> space = SearchSpace({"training.lr": [0.01, 0.1], "method.mu": [0, 1, 2]})
    >>> space.size, space.combination(4)
    (6, {'training.lr': 0.1, 'method.mu': 1})
    """

    values: dict[str, list[Any]]

    @property
    def size(self) -> int:
        """Number of combinations; 1, the empty one, where nothing is searched."""
        return math.prod(len(values) for values in self.values.values())

    def combination(self, place: int) -> Combination:
        """One combination: the grid is walked with the last key changing fastest."""
        chosen = {}
        for key, values in reversed(self.values.items()):
            place, which = divmod(place, len(values))
            chosen[key] = values[which]
        return dict(reversed(chosen.items()))

    def grid(self) -> list[Combination]:
        """Every combination."""
        return [self.combination(place) for place in range(self.size)]

    def sample(self, count: int, stream: np.random.Generator) -> list[Combination]:
        """`count` different combinations drawn evenly, all of them where there are no more.

        With the same stream, a larger count adds to what a smaller one draws.
        """
        drawn: dict[int, None] = {}
        while len(drawn) < min(count, self.size):
            drawn[int(stream.integers(self.size))] = None
        return [self.combination(place) for place in drawn]


def search_space(experiment: Experiment, label: str, method: str, fixed: Collection[str]) -> SearchSpace:
    """What `[tune]` says of one method: the keys of all, then of `[tune.METHOD]`, then of `[tune.LABEL]`.

    A list that comes later replaces an earlier one of the same key.

    Args:
        experiment: holds the section.
        label: the method, preset or variant.
        method: the name of the method that it stands for.
        fixed: dotted keys that the label itself sets. They are searched only if `[tune.LABEL]` names them.

    Raises:
        InputError: a section of no method, a key that cannot be searched, or something else than a list of values.
    """
    general = _shared(experiment) | _own(experiment, method)
    found = {key: values for key, values in general.items() if key not in fixed} | _own(experiment, label)
    for key, values in found.items():
        _check_key(key)
        _check_values(key, values)
    return SearchSpace(found)


def _shared(experiment: Experiment) -> dict[str, Any]:
    """The lists that are for every method."""
    if not experiment.tune:
        raise InputError(f"[tune] is empty: say which values to try, as {_EXAMPLE}")
    owners = {*METHODS, *PRESETS, *experiment.variants}
    found: dict[str, Any] = {}
    for name, inner in experiment.tune.items():
        if name in owners or kind_of(name) is not None:
            continue
        if isinstance(inner, Mapping) and name not in Experiment.model_fields:
            hint = suggestion(name, [*owners, *SECTIONS])
            raise InputError(f"[tune.{name}]: there is no method, variant or section {name!r}{hint}")
        found |= dotted({name: inner})
    return found


def _own(experiment: Experiment, owner: str) -> dict[str, Any]:
    """The lists of `[tune.OWNER]`; a key without a dot is the method's."""
    section = experiment.tune.get(owner, {})
    if not isinstance(section, Mapping):
        raise InputError(f"tune.{owner}: expected a section [tune.{owner}] of lists, found {section!r}")
    return {key if "." in key else f"method.{key}": values for key, values in dotted(section).items()}


def _check_key(key: str) -> None:
    """InputError for a key whose values would give trials unequal rounds or images, or another method."""
    section = key.partition(".")[0]
    foreign = section in Experiment.model_fields and section not in SECTIONS
    if foreign or key in _UNEQUAL or key == "method.name":
        raise InputError(
            f"[tune] {key}: cannot be searched; keys of [training] (not local_epochs), of [model] and of the methods "
            "can, so that all trials have the same rounds and images"
        )


def _check_values(key: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise InputError(f"[tune] {key}: expected a list of values, as {_EXAMPLE}, found {values!r}")
    doubled = [value for place, value in enumerate(values) if value in values[:place]]
    if doubled:
        raise InputError(f"[tune] {key}: {doubled[0]!r} stands twice in the list")
