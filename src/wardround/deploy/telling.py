"""What a server or client says while it runs: a line with the time, on the terminal and in a file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES, LOG_FILES = 5 * 2**20, 3


def telling(file: Path) -> Callable[[str], None]:
    """Something that says a sentence; `file` keeps what is said."""
    logger = logging.getLogger("wardround.deploy")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    form = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    kept = RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    for handler in (logging.StreamHandler(sys.stderr), kept):
        handler.setFormatter(form)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger.info
