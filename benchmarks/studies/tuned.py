"""A tuned comparison on one federation as one command, which may be stopped and goes on: search, runs, page."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keep

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        name: of the experiment file beside this one, and of the page and the kept runs in docs/results.
        methods: methods, presets or labels of `[variants]`.
        trial_rounds: rounds of each trial of the search.
        experiment: the experiment file's name, where it is another one.
        settings: keys of it that have other values, as `--set` takes them.
    """

    name: str
    methods: Sequence[str]
    trial_rounds: int
    experiment: str = ""
    settings: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """The experiment."""
        return HERE / f"{self.experiment or self.name}.toml"

    @property
    def page(self) -> Path:
        """The tables."""
        return RESULTS / f"{self.name}.md"

    @property
    def kept(self) -> Path:
        """Finished runs, for another machine to go on from."""
        return RESULTS / f"{self.name}.tar.xz"


def run(study: Study, seeds: int, out: Path) -> None:
    """Tune every method on validation images with the same budget, compare the tuned methods, write the page."""
    tuned, compared, names = out / "tune", out / "compare", ",".join(study.methods)
    if study.kept.exists():
        keep.unpack(study.kept, out)
    try:
        changes = [word for setting in study.settings for word in ("--set", setting)]
        wardround("tune", study.file, *changes, "--methods", names, "--rounds", study.trial_rounds, "--out", tuned)
        wardround("compare", tuned / "tuned.toml", "--methods", names, "--seeds", seeds, "--out", compared, "--no-skew")
        wardround("report", compared, "--markdown", study.page)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        keep.pack(out, study.kept)
    tuning = json.loads((tuned / "tuning.json").read_text(encoding="utf-8"))
    page = study.page.read_text(encoding="utf-8") + "\n" + "\n\n".join(settings(tuning)) + "\n"
    study.page.write_text(page, encoding="utf-8")


def wardround(*arguments: object) -> None:
    """Run the command; its exit status, if it is not 0, becomes ours."""
    done = subprocess.run([Path(sysconfig.get_path("scripts"), "wardround"), *map(str, arguments)], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def settings(tuning: Mapping[str, Any]) -> Iterator[str]:
    """A chapter of the page: what the search chose, from `tuning.json`."""
    clients = ", ".join(f"{name} {counts['val']}" for name, counts in tuning["images"].items())
    yield "## Settings chosen on validation images"
    yield (
        f"Every method had at most {tuning['budget']} trials of {tuning['rounds']} rounds with seed "
        f"{tuning['seeds'][0]}; the score is the unweighted mean over clients of balanced accuracy in percent on their "
        f"validation images ({clients}). It is the best of several and therefore too high: it chooses, it does not "
        "compare."
    )
    rows = [
        f"| {label} | {_values(found['best']['values'])} | {100 * found['best']['score']:.1f} | {_scores(found)} |"
        for label, found in tuning["methods"].items()
    ]
    yield "\n".join(["| method | chosen | score | all trials |", "|---|---|---:|---|", *rows])
    if tuning["notes"]:
        yield "\n".join(f"- {note}" for note in tuning["notes"])


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.removeprefix('method.')} = {json.dumps(value)}" for key, value in values.items())


def _scores(found: Mapping[str, Any]) -> str:
    scores = [trial["score"] for trial in found["trials"]]
    return ", ".join("failed" if score is None else f"{100 * score:.1f}" for score in scores)
