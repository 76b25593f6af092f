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

from wardround.data.options import DataOptions
from wardround.errors import InputError
from wardround.federation.codecs import codec_named
from wardround.federation.rounds import RoundOptions
from wardround.methods.base import Method
from wardround.methods.registry import method_from
from wardround.models.options import ModelOptions
from wardround.options import Options, explain
from wardround.training.options import TrainingOptions

# Keys that say where and how fast a run happens, but not what it computes.
_NOT_NUMBERS = (
    ("rounds",),
    ("data", "path"),
    ("data", "fold_file"),
    ("transport", "workers"),
    ("training", "cache_ram_mib"),
    ("federation", "checkpoint_every"),
    ("federation", "deadline"),
    ("methods",),
    ("variants",),
)


class TransportOptions(Options):
    """The `[transport]` section: what carries the messages, and in which form."""

    name: Literal["local"] = Field("local", description="local: workers of this machine")
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
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"}, description="name and its own keys")
    federation: RoundOptions = Field(RoundOptions(), description="who takes part, and when to evaluate")
    transport: TransportOptions = Field(TransportOptions(), description="what carries the messages")
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="`compare`: keys of a method, as [methods.pafp]"
    )
    variants: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="`compare`: a label, and the keys that differ, as {method.name = ...}",
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
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def write(self, file: Path) -> None:
        """Write every key, defaults included, as TOML."""
        tree = self.complete().to_toml()
        file.write_text(tomli_w.dumps(tree), encoding="utf-8")


def load_experiment(file: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read an experiment file.

    Relative paths in it start from the file's own folder, or from the current one where that does not have them.

    Args:
        file: TOML.
        overrides: `key.of.section=value` as typed after `--set`.

    Raises:
        InputError: unreadable, not TOML, unknown keys, values that are not allowed.
    """
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from error
    apply(tree, dict(parse_override(text) for text in overrides))
    experiment = experiment_from(tree, str(file))
    return experiment.model_copy(update={"data": _resolve(experiment.data, file.parent)})


def experiment_from(tree: Mapping[str, Any], where: str) -> Experiment:
    """Validate a parsed experiment file; `where` begins the error message.

    Raises:
        InputError: unknown keys, values that are not allowed.
    """
    try:
        experiment = Experiment(**tree)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, Experiment)}") from error
    experiment.bound_method()
    return experiment


def parse_override(text: str) -> tuple[str, Any]:
    """`training.lr=0.1` as a dotted key and a TOML value; what is not a TOML value is a string.

    Raises:
        InputError: there is no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text}: expected KEY=VALUE, such as training.lr=0.1")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def apply(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set dotted keys in a tree of sections, in place. Another `method.name` clears that section's other keys."""
    for key, value in changes.items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InputError(f"{key}: {part} is a value, not a section")
        if key == "method.name" and section.get("name") != value:
            section.clear()
        section[last] = value


def differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Keys that decide the numbers and differ, as `key: theirs -> ours`."""
    mine, other = (_flat(e.complete().to_toml()) for e in (ours, theirs))
    skipped = {".".join(path) for path in _NOT_NUMBERS}
    keys = [k for k in sorted(mine.keys() | other.keys()) if not any(f"{k}.".startswith(f"{s}.") for s in skipped)]
    return [f"{k}: {other.get(k)!r} -> {mine.get(k)!r}" for k in keys if mine.get(k) != other.get(k)]


def _resolve(data: DataOptions, folder: Path) -> DataOptions:
    changes = {}
    for key in ("path", "fold_file"):
        value = getattr(data, key)
        if value is not None:
            here, beside = Path(value).expanduser(), folder / Path(value).expanduser()
            changes[key] = str((beside if beside.exists() or not here.exists() else here).resolve())
    return data.model_copy(update=changes)


def _drop(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        tree = tree.get(part, {})
    tree.pop(path[-1], None)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
