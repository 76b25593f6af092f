"""The systems of a comparison: what `--methods` names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wardround.config import Experiment, parse_override
from wardround.errors import InputError, suggestion
from wardround.methods.registry import METHODS, PRESETS, kind_of


@dataclass(frozen=True)
class System:
    """One row of a comparison: a label, and the experiment that it stands for."""

    label: str
    experiment: Experiment

    @property
    def folder_name(self) -> str:
        """The label as a folder's name."""
        return as_folder(self.label)

    def seeded(self, seed: int) -> Experiment:
        """The experiment with another seed."""
        return self.experiment.model_copy(update={"seed": seed})


def as_folder(label: str) -> str:
    """A label as a folder's name.

    >>> as_folder("pafp: every 3")
    'pafp-every-3'
    """
    return re.sub(r"[^\w.=+,-]+", "-", label)


def systems_named(experiment: Experiment, names: Iterable[str]) -> list[System]:
    """The systems that `--methods` names.

    A name is a label of `[variants]`, a method, or a preset such as `ft-2b`, in any case, each followed by any number
    of `:key=value`; a key without a dot is the method's own: `pafp-alt:every=3:model.head=shared`. A variant goes
    before a method of the same name.

    Raises:
        InputError: an unknown name, or keys that do not fit.
    """
    labels = [_as_labelled(experiment, name) for name in names]
    found = [System(label, _experiment_of(experiment, label)) for label in labels]
    folders = [system.folder_name for system in found]
    doubled = [system.label for system in found if folders.count(system.folder_name) > 1]
    if doubled:
        raise InputError(f"--methods: {' and '.join(doubled)} would share one name; each system needs its own")
    if not found:
        raise InputError("--methods: name at least one method")
    return found


def _as_labelled(experiment: Experiment, name: str) -> str:
    """`name` as `[variants]` spells it, where one label there is the same but for case."""
    alike = [label for label in experiment.variants if label.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else name


def _experiment_of(experiment: Experiment, name: str) -> Experiment:
    """The experiment that one name stands for."""
    where = f"--methods {name}"
    head, *settings = (name,) if name in experiment.variants else re.split(r":(?=[\w.-]+=)", name)
    changes = _changes(experiment, _as_labelled(experiment, head))
    for setting in settings:
        key, value = parse_override(setting)
        changes[key if "." in key else f"method.{key}"] = value
    return experiment.changed(changes, where)


def _changes(experiment: Experiment, head: str) -> dict[str, Any]:
    """What a variant, preset or method changes, as dotted keys."""
    if head in experiment.variants:
        return experiment.variant(head)
    plain = head.lower()
    if plain not in PRESETS and kind_of(plain) is None:
        known = [*METHODS, *PRESETS, *experiment.variants]
        raise InputError(f"--methods: there is no method or variant {head!r}{suggestion(plain, known)}")
    return dict(PRESETS.get(plain, {"method.name": plain}))
