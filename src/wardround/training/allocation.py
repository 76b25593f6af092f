"""Memory that stays with the process between steps."""

from __future__ import annotations

import contextlib
import ctypes
import sys

# From malloc.h: what a later mallopt call is about.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30


def keep_memory() -> None:
    """Let the C library keep freed blocks instead of returning them to the kernel after every step.

    Training frees and asks for the same large blocks over and over; each return costs page faults (about a tenth
    of a step on the processors we measured). Without effect where the C library is not glibc.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, _KEEP)
            library.mallopt(_M_TRIM_THRESHOLD, _KEEP)
