"""What all sides of a deployment have agreed on: the experiment, who takes part, and the words for classes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import tomli_w
from pydantic import Field, ValidationError

from wardround.config import Experiment, experiment_from, load_experiment, read_toml
from wardround.errors import InputError
from wardround.federation.files import write_atomically
from wardround.options import Options, explain

EXPERIMENT, FEDERATION = "experiment.toml", "federation.toml"
Kind = TypeVar("Kind", bound=Options)
MIN_COUNT = 20
IMAGES = "images"  # where a client's images are, unless it says otherwise
CAPTIONS = "captions.jsonl"  # likewise its captions, where they are in a file
FILL_IN = "FILL:IN"  # a function that each client has to name for itself: none is called because another side says so


class Parties(Options):
    """`federation.toml`: who takes part, and the words that all use."""

    clients: tuple[str, ...] = Field(min_length=1, description="names of the hospitals, in the order of their replies")
    classes: tuple[str, ...] = Field(min_length=2, description="what images are told apart, in the order of the logits")
    modalities: tuple[str, ...] = Field(("image",), min_length=1, description="kinds of images")
    min_count: int = Field(MIN_COUNT, ge=0, description="a client tells nothing that sums up fewer images than this")


@dataclass(frozen=True)
class Agreement:
    """The experiment as it was handed to every side, and its parties."""

    experiment: Experiment
    parties: Parties

    @cached_property
    def digest(self) -> str:
        """A hash of all that is agreed on; each side computes it from its own files."""
        agreed = {"experiment": self._portable.digest(), "rounds": self.experiment.rounds, **self.parties.to_toml()}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()

    @property
    def _portable(self) -> Experiment:
        """The experiment without the places of this machine. What pretrained weights are is compared by their bytes."""
        tree = self.experiment.to_toml()
        if tree["data"].get("path") not in (None, "none"):
            tree["data"]["path"] = IMAGES
        if isinstance(self.experiment.model.pretrained, str):
            tree["model"]["pretrained"] = True
        if self.experiment.captions.file is not None:
            tree["captions"]["file"] = CAPTIONS
        if self.experiment.captions.callable is not None:
            tree["captions"]["callable"] = FILL_IN
        return experiment_from(tree, EXPERIMENT)

    def write(self, folder: Path) -> None:
        """Write both files."""
        self._portable.write(folder / EXPERIMENT)
        write_atomically(folder / FEDERATION, tomli_w.dumps(self.parties.to_toml()).encode())


def read_agreement(folder: Path) -> Agreement:
    """What a folder that `deploy init` made has agreed on.

    Raises:
        InputError: a file is missing or wrong.
    """
    parties = read_options(folder / FEDERATION, Parties)
    return Agreement(load_experiment(folder / EXPERIMENT), parties)


def read_options(file: Path, kind: type[Kind]) -> Kind:
    """A TOML file as `kind`.

    Raises:
        InputError: unreadable, not TOML, unknown keys, values that are not allowed.
    """
    try:
        return kind(**read_toml(file))
    except ValidationError as error:
        raise InputError(f"{file}: {explain(error, kind)}") from error
