"""Remember what was found out about files until one of them changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from wardround.data.cache import default_folder, file_stamp
from wardround.federation.files import write_atomically

_Found = TypeVar("_Found")  # as JSON can hold it


def remembered(kind: str, files: Iterable[Path], find_out: Callable[[], _Found]) -> _Found:
    """What `find_out` found when it last looked at these files, or finds now.

    It is kept as JSON beside the decoded images (`default_folder()`), under a digest of the files' names, sizes and
    times. A folder that cannot be written to is no error.

    Args:
        kind: what is found out; another kind is remembered apart.
        files: all that it depends on, in their order.
        find_out: looks at the files.
    """
    digest = hashlib.sha256("\n".join(map(file_stamp, files)).encode()).hexdigest()[:32]
    memory = default_folder() / "found" / f"{kind}-{digest}.json"
    with contextlib.suppress(OSError, ValueError):
        known: _Found = json.loads(memory.read_text(encoding="utf-8"))
        return known
    found = find_out()
    with contextlib.suppress(OSError):
        write_atomically(memory, json.dumps(found).encode(), durable=False)
    return found
