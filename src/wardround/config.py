"""An experiment file: TOML in, one immutable object out, clear errors on the way."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator

from wardround.captions.options import CaptionOptions
from wardround.data.options import DataOptions
from wardround.errors import InputError, suggestion
from wardround.federation.codecs import codec_named
from wardround.federation.files import write_atomically
from wardround.federation.rounds import RoundOptions
from wardround.keys import describe_keys
from wardround.methods.base import Method
from wardround.methods.registry import METHODS, kind_of, method_from
from wardround.models.options import ModelOptions
from wardround.models.prompts import TextOptions
from wardround.options import Options, explain
from wardround.training.options import TrainingOptions
from wardround.training.selftest import CHOICES

DEFAULT_METHOD = "fedavg"

# Keys that name a file or folder.
PATHS = (
    ("data", "path"), ("data", "fold_file"), ("model", "pretrained"), ("model", "anchors"), ("captions", "file"),
)  # fmt: skip

# Keys that say where and how fast a run happens, but not what it computes.
_NOT_NUMBERS = (
    ("rounds",),
    ("data", "path"),
    ("data", "fold_file"),
    ("captions", "file"),
    ("transport", "name"),
    ("transport", "workers"),
    ("training", "cache_ram_mib"),
    ("federation", "checkpoint_every"),
    ("federation", "deadline"),
    ("methods",),
    ("variants",),
    ("tune",),
)


class TransportOptions(Options):
    """The `[transport]` section: what carries the messages, and in which form."""

    name: Literal["local", "flower"] = Field(
        "local", description="local: workers of this machine; flower: the same messages over Flower's simulation"
    )
    workers: int | None = Field(None, ge=1, description="worker processes; none: one a processor core")
    codec: str = Field(
        "float32", description="float32, float16, float16+zlib or float16+shuffle+zlib, in both directions"
    )
    state_ram_mib: int = Field(1024, ge=0, description="memory for clients' local state, over all workers")

    @field_validator("codec")
    @classmethod
    def _codec_exists(cls, value: str) -> str:
        try:
            return codec_named(value).name
        except InputError as error:
            raise ValueError(str(error).removeprefix("transport.codec: ")) from error


class Experiment(Options):
    """Everything that an experiment file may say, with its defaults."""

    seed: int = Field(0, description="of every random draw")
    rounds: int = Field(20, ge=0, description="federated rounds")
    data: DataOptions = Field(description="where the images come from")
    model: ModelOptions = Field(ModelOptions(), description="the network")
    training: TrainingOptions = Field(TrainingOptions(), description="local training")
    text: TextOptions = Field(TextOptions(), description="words for classes, for encoders with a text side")
    captions: CaptionOptions = Field(CaptionOptions(), description="sentences about training images to learn from")
    method: dict[str, Any] = Field(
        default_factory=lambda: {"name": DEFAULT_METHOD}, description="name and its own keys"
    )
    federation: RoundOptions = Field(RoundOptions(), description="who takes part, and when to evaluate")
    transport: TransportOptions = Field(TransportOptions(), description="what carries the messages")
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="`compare`: keys of a method, as [methods.pafp]"
    )
    variants: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="`compare`: a label, and the keys that differ, as {method.name = ...}",
    )
    tune: dict[str, Any] = Field(
        default_factory=dict,
        description="`tune`: lists of values to try, as [tune.training] lr = [0.01, 0.1] or, of a method, [tune.pafp]",
    )

    def bound_method(self) -> Method:
        """The method that the `[method]` section describes.

        Raises:
            InputError: no such method, an unknown key or a value that is not allowed.
        """
        return method_from(self.method)

    def complete(self) -> Experiment:
        """This experiment with every default of its method written out."""
        method = self.bound_method()
        return self.model_copy(update={"method": {"name": method.name, **method.to_toml()}})

    def digest(self) -> str:
        """A hash of all that decides the numbers of a run, whatever its length, place and number of workers."""
        tree = self.complete().to_toml()
        for path in _NOT_NUMBERS:
            _drop(tree, path)
        if self.captions.provider == "none":  # the section's other keys decide nothing, and earlier versions lack it
            _drop(tree, ("captions",))
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def write(self, file: Path) -> None:
        """Write every key, defaults included, as TOML."""
        write_atomically(file, tomli_w.dumps(self.complete().to_toml()).encode())

    def changed(self, changes: Mapping[str, Any], where: str) -> Experiment:
        """This experiment with other values for dotted keys: one system of a comparison.

        Another `method.name` starts from that method's defaults and its `[methods.NAME]` section.

        Raises:
            InputError: keys that do not exist, values that are not allowed; `where` begins the message.
        """
        name = changes.get("method.name", self.method.get("name", DEFAULT_METHOD))
        tree = self.to_toml() | {"methods": {}, "variants": {}, "tune": {}}
        try:
            apply(tree, {"method.name": name})
            apply(tree, {f"method.{key}": value for key, value in self.methods.get(str(name), {}).items()})
            apply(tree, changes)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        return experiment_from(tree, where)

    def variant(self, label: str) -> dict[str, Any]:
        """What the section `[variants.LABEL]` changes, as dotted keys."""
        return dotted(self.variants[label])


def load_experiment(file: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read an experiment file.

    Relative paths in it start from the file's own folder, or from the current one where that does not have them;
    those in `overrides` the other way round, for they are typed in the current folder.

    Args:
        file: TOML.
        overrides: `key.of.section=value` as typed after `--set`.

    Raises:
        InputError: unreadable, not TOML, unknown keys, values that are not allowed.
    """
    tree = read_toml(file)
    _resolve(tree, [file.parent, Path()])
    _override(tree, overrides, file.parent)
    return experiment_from(tree, str(file))


def read_toml(file: Path) -> dict[str, Any]:
    """What a TOML file says.

    Raises:
        InputError: unreadable, or not TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from error


def _override(tree: dict[str, Any], overrides: Iterable[str], folder: Path) -> None:
    """Apply what was typed after `--set`, in place."""
    typed: dict[str, Any] = {}
    try:
        apply(typed, dict(parse_override(text) for text in overrides))
        _resolve(typed, [Path(), folder])
        apply(tree, dotted(typed))
    except InputError as error:
        raise InputError(f"--set {error}") from error


def experiment_from(tree: Mapping[str, Any], where: str) -> Experiment:
    """Validate a parsed experiment file, its method and variants too; `where` begins the error message.

    Raises:
        InputError: unknown keys, values that are not allowed.
    """
    try:
        experiment = Experiment(**tree)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, Experiment)}") from error
    try:
        experiment.bound_method().refuse(experiment.training)
        _refuse_captions(experiment)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    _check_systems(experiment, where)
    return experiment


def _refuse_captions(experiment: Experiment) -> None:
    """InputError where captions are asked for and something else does not go with them."""
    captions, model, method = experiment.captions, experiment.model, experiment.bound_method()
    if captions.provider == "none":
        return
    asked = f'captions.provider = "{captions.provider}"'
    if not method.goes_with_captions():
        raise InputError(f'{asked}: method.name = "{method.name}" learns from words for classes (allowed: "none")')
    if captions.fusion and (model.classifier != "linear" or model.adapter != "none"):
        raise InputError(
            f'{asked}: model.classifier = "text" and model.adapter take the features as the encoder gives them, and '
            "captions.fusion = true changes these (allowed with them: captions.fusion = false)"
        )
    if experiment.training.compile != "off":
        raise InputError(f'{asked}: training.compile = "{experiment.training.compile}" (allowed with captions: "off")')


def _check_systems(experiment: Experiment, where: str) -> None:
    """InputError unless every `[methods.NAME]` and `[variants.LABEL]` gives an experiment, used or not."""
    for name in experiment.methods:
        if kind_of(name) is None:
            raise InputError(f"{where}: methods.{name}: there is no such method{suggestion(name, METHODS)}")
        experiment.changed({"method.name": name}, f"{where}: [methods.{name}]")
    for label in experiment.variants:
        experiment.changed(experiment.variant(label), f"{where}: [variants.{label}]")


_PYTHON_WORDS = {"True": True, "False": False, "None": "none"}


def parse_override(text: str) -> tuple[str, Any]:
    """`training.lr=0.1` as a dotted key and a TOML value; what is not a TOML value is a string.

    Raises:
        InputError: there is no `=`.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise InputError(f"{text}: expected KEY=VALUE, such as training.lr=0.1")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, _PYTHON_WORDS.get(value, value)


def apply(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set dotted keys in a tree of sections, in place. Another `method.name` clears that section's other keys."""
    name = changes.get("method.name")
    if name is not None and isinstance(tree.get("method"), dict) and tree["method"].get("name") != name:
        tree["method"] = {}
    for key, value in changes.items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InputError(f"{key}: {part} is a value, not a section")
        section[last] = value


def experiment_keys(section: str | None = None) -> list[dict[str, Any]]:
    """Every key of an experiment file but those of methods, as `describe_keys` has them.

    Raises:
        InputError: there is no such section.
    """
    every = [one for one in describe_keys(Experiment) if one["key"] not in ("method", "methods", "variants", "tune")]
    chosen = [one for one in every if section is None or f"{one['key']}.".startswith(f"{section}.")]
    if not chosen:
        known = {one["key"].rpartition(".")[0] for one in every} - {""}
        raise InputError(f"there is no section {section!r}{suggestion(str(section), known)}")
    return chosen


def differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Keys that decide the numbers and differ, as `key: theirs -> ours`; what is `auto` in ours fits any choice."""
    mine, other = (dotted(e.complete().to_toml()) for e in (ours, theirs))
    skipped = tuple(f"{'.'.join(path)}." for path in _NOT_NUMBERS)
    chosen = {f"training.{key}" for key in CHOICES if getattr(ours.training, key) == "auto"}
    keys = [key for key in mine.keys() | other.keys() if key not in chosen and not f"{key}.".startswith(skipped)]
    return [f"{k}: {other.get(k)!r} -> {mine.get(k)!r}" for k in sorted(keys) if mine.get(k) != other.get(k)]


def _resolve(tree: Mapping[str, Any], folders: Iterable[Path]) -> None:
    """Make the paths in a tree absolute, in place: from the first folder that has them, else from the very first."""
    homes = list(folders)
    for changes in _sections(tree.get("variants")):
        _resolve(changes, homes)
    for section, key in PATHS:
        inside = tree.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(key), str) and inside[key] not in ("", "none"):
            places = [home / Path(inside[key]).expanduser() for home in homes]
            inside[key] = str(next((place for place in places if place.exists()), places[0]).resolve())


def _sections(tree: Any) -> list[dict[str, Any]]:
    return [inner for inner in tree.values() if isinstance(inner, dict)] if isinstance(tree, dict) else []


def _drop(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        tree = tree.get(part, {})
    tree.pop(path[-1], None)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of sections as one dictionary of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
