"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from wardround.config import experiment_from
from wardround.methods.registry import METHODS

ROOT = Path(__file__).parents[1]


def test_generated_pages_are_up_to_date() -> None:
    """They are what docs/generate.py writes."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, page in module.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"run python docs/generate.py: {name}"


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.toml")) + sorted(ROOT.glob("benchmarks/**/*.toml")))
def test_every_experiment_file_is_valid(file: Path) -> None:
    """No example has an unknown key or a value that is not allowed."""
    experiment_from(tomllib.loads(file.read_text()), str(file))


def test_the_readme_names_every_method() -> None:
    """The table of methods is complete."""
    readme = (ROOT / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in METHODS)


def test_the_readmes_method_runs() -> None:
    """The FedProx of the README is code that works: at mu = 0 its loss is the task loss."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    space: dict[str, object] = {"__name__": "readme"}
    exec(compile(block[1].replace("from __future__ import annotations\n", ""), "README.md", "exec"), space)
    kind = space["FedProx"]
    assert isinstance(kind, type)
    assert kind().mu == 0.01


def test_links_lead_somewhere() -> None:
    """Relative links in the documents point to files that exist."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
