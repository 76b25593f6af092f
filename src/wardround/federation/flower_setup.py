"""Whether Flower is there, which one, and with its telemetry off: to be asked before anything of it is imported."""

from __future__ import annotations

import importlib.metadata
import os

from wardround.errors import InputError

TESTED = ((1, 42), (1, 43))  # from, and below
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # else any other process goes before the clients
}


def need_flower() -> str | None:
    """See that Flower can be used, and switch off what it and Ray would send elsewhere.

    Returns:
        A warning where its version is not among those that were tested.

    Raises:
        InputError: it is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError as missing:
        raise InputError(
            f'this needs Flower: pip install "wardround[flower]" (tested: {tested_versions()}); '
            'without it, transport.name = "local" runs federations on this machine'
        ) from missing
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if TESTED[0] <= numbers < TESTED[1]:
        return None
    return f"Flower {version} is not among the versions that were tested ({tested_versions()})"


def tested_versions() -> str:
    """The versions of Flower that were tested, in words."""
    first, last = (".".join(map(str, version)) for version in TESTED)
    return f"from {first} to before {last}"
