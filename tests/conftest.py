"""Shared by all tests: caches go to a temporary folder, one thread, and no hub is ever asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import os

    os.environ["WARDROUND_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def shared() -> Path:
    """The folder of real images beside the project; the test is skipped where it is absent."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder.name} is not beside the project")
    return folder
