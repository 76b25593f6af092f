"""Which methods help against which kind of skew: phantoms with one dial turned at a time.

    python benchmarks/studies/dials.py [--methods a,b] [--seeds 3] [--set KEY=VALUE] [--out DIR]
    python benchmarks/studies/dials.py --draw       # only the figure and the page, from what is finished

Runs one comparison for each kind of skew, and one without any, below --out; what is finished there is kept, so the
same command goes on after a stop. Then draws docs/pictures/dials.png and writes the figures into
docs/which-method.md. The experiment is dials.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from wardround.comparing import COMPARISON, compare
from wardround.config import Experiment, load_experiment
from wardround.display import CompareDisplay
from wardround.errors import RunError
from wardround.methods.registry import METHODS
from wardround.report.pictures import HeatMap, save_heatmaps
from wardround.report.words import signed
from wardround.systems import systems_named

ROOT = Path(__file__).parents[2]
EXPERIMENT = Path(__file__).with_name("dials.toml")
PAGE, PICTURE = ROOT / "docs" / "which-method.md", ROOT / "docs" / "pictures" / "dials.png"
KINDS = ("none", "feature", "label", "quantity", "concept")
REFERENCES = ("isolated", "fedavg")
MEASURE = "unweighted_average"
ON_IMAGES = tuple(name for name, kind in METHODS.items() if not kind.needs_text)
BEGIN, END = "<!-- written by benchmarks/studies/dials.py -->", "<!-- end -->"

Comparisons = Mapping[str, Mapping[str, Any]]  # `comparison.json` by kind of skew


@dataclass(frozen=True)
class Gains:
    """Methods against one reference, in points of balanced accuracy.

    Attributes:
        methods: names of the rows.
        points: `(methods, KINDS)`; NaN where a method or the reference has not finished.
        certain: `(methods, KINDS)`, where the 95 % interval of the difference does not hold 0.
    """

    methods: tuple[str, ...]
    points: NDArray[np.float64]
    certain: NDArray[np.bool_]


def gains(comparisons: Comparisons, reference: str) -> Gains:
    """Every method but the reference, under every kind of skew, minus the reference."""
    names = tuple(name for name in methods_in(comparisons) if name != reference)
    cells = [[_difference(comparisons.get(kind), name, reference) for kind in KINDS] for name in names]
    values = np.array(cells, dtype=np.float64).reshape(len(names), len(KINDS), 3)
    certain = (values[..., 1] > 0) | (values[..., 2] < 0)
    return Gains(names, 100 * values[..., 0], certain)


def _difference(comparison: Mapping[str, Any] | None, method: str, reference: str) -> tuple[float, float, float]:
    """Difference, and the ends of its interval, as fractions; NaN where it is unknown."""
    labels = comparison["matrix"]["labels"] if comparison else []
    if comparison is None or method not in labels or reference not in labels:
        return (np.nan, np.nan, np.nan)
    i, j = labels.index(method), labels.index(reference)
    found = comparison["matrix"][MEASURE]
    return (found["difference"][i][j], found["low"][i][j], found["high"][i][j])


def methods_in(comparisons: Comparisons) -> tuple[str, ...]:
    """Every method that has finished somewhere, in the comparisons' order."""
    return tuple(dict.fromkeys(name for found in comparisons.values() for name in found["methods"]))


def accuracy(comparisons: Comparisons, method: str, kind: str) -> float:
    """Balanced accuracy in percent, every client counting the same; NaN where it is unknown."""
    found = comparisons.get(kind, {}).get("methods", {}).get(method)
    return 100 * found[MEASURE]["value"] if found else float("nan")


def draw(comparisons: Comparisons, file: Path) -> None:
    """One heat map for each reference: method x kind of skew."""
    columns = [kind if kind != "none" else "no skew" for kind in KINDS]
    found = {reference: gains(comparisons, reference) for reference in REFERENCES}
    maps = [
        HeatMap(f"points above {reference}", one.methods, columns, one.points, one.certain)
        for reference, one in found.items()
    ]
    save_heatmaps(file, [maps], lambda value: signed(value / 100))


# ---- the page


def page_part(comparisons: Comparisons, experiment: Experiment, picture: str) -> str:
    """What the page says of the study, as Markdown: picture, set-up, table, best methods of each kind."""
    return "\n\n".join(
        [
            f"![Method by kind of skew: points of balanced accuracy above isolated and above fedavg]({picture})",
            set_up(comparisons, experiment),
            "\n".join(_table(comparisons)),
            "\n".join(_best(comparisons)),
        ]
    )


def set_up(comparisons: Comparisons, experiment: Experiment) -> str:
    """On what the figures rest, in a paragraph."""
    images, seeds = experiment.data.phantoms, _seeds(comparisons)
    least = [found["smallest_difference"][MEASURE] for found in comparisons.values()]
    smallest = max((100 * value for value in least if value is not None), default=float("nan"))
    return (
        f"{images.clients} sites, {images.family}, {images.classes} classes, {images.train_per_client} training images "
        f"a site on average, {images.test_per_client} test images a site, {experiment.data.image_size} px; "
        f"{experiment.model.backbone}, last {experiment.model.finetune_blocks} blocks trained, {experiment.rounds} "
        f"rounds, learning rate {experiment.training.lr:g}, {seeds}. Balanced accuracy of the clients' own "
        "models in percent, every client counting the same. Bold: the 95 % interval of the difference does not hold 0 "
        f"(not corrected for the number of cells). This test set can show a difference of about {smallest:.1f} points."
    )


def _seeds(comparisons: Comparisons) -> str:
    """How many seeds stand behind the columns; which, where they differ."""
    counts = {kind: len(found["seeds"]) for kind, found in comparisons.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} ({'no skew' if kind == 'none' else kind})" for kind, count in counts.items())
        return f"seeds: {each}"
    count = next(iter(counts.values()))
    return f"{count} seed{'s' if count > 1 else ''}"


def _table(comparisons: Comparisons) -> Iterator[str]:
    """Accuracies, a row a method."""
    yield f"| method | {' | '.join('no skew' if kind == 'none' else kind for kind in KINDS)} |"
    yield "|---|" + "---|" * len(KINDS)
    for name in methods_in(comparisons):
        values = (accuracy(comparisons, name, kind) for kind in KINDS)
        yield f"| `{name}` | {' | '.join('–' if value != value else f'{value:.1f}' for value in values)} |"


def _best(comparisons: Comparisons, most: int = 3) -> Iterator[str]:
    """The best methods of each kind, and whether any beats both references for certain."""
    for kind in (kind for kind in KINDS if kind in comparisons):
        names = sorted(comparisons[kind]["methods"], key=lambda name: -accuracy(comparisons, name, kind))
        shown = ", ".join(f"`{name}` {accuracy(comparisons, name, kind):.1f}" for name in names[:most])
        both = [f"`{name}`" for name in names if all(_beats(comparisons[kind], name, other) for other in REFERENCES)]
        what = "Without skew" if kind == "none" else f"{kind.capitalize()} skew"
        yield f"- {what}: {shown}. Better than isolated and fedavg for certain: {', '.join(both) or 'none'}."


def _beats(comparison: Mapping[str, Any], method: str, reference: str) -> bool:
    return _difference(comparison, method, reference)[1] > 0


def insert(page: str, part: str) -> str:
    """`page` with `part` between the two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


# ---- the runs


def settings(kind: str) -> list[str]:
    """What the comparison of one kind of skew changes in the experiment."""
    return [] if kind == "none" else [f"data.phantoms.{kind}_skew=1.0"]


def train(methods: Sequence[str], seeds: int, changes: Sequence[str], out: Path, workers: int | None) -> list[str]:
    """One comparison a kind of skew; returns what failed."""
    failures = []
    for kind in KINDS:
        experiment = load_experiment(EXPERIMENT, [*settings(kind), *changes])
        display = CompareDisplay(Console(stderr=True))
        print(f"{kind}:", file=sys.stderr)
        try:
            numbers = range(experiment.seed, experiment.seed + seeds)
            compare(systems_named(experiment, methods), numbers, out / kind, display, workers)
        except RunError as error:
            failures.append(f"{kind}: {error}")
        finally:
            display.close()
    return failures


def finished(out: Path) -> dict[str, Any]:
    """The comparisons that are there, by kind of skew."""
    files = {kind: out / kind / COMPARISON for kind in KINDS}
    return {kind: json.loads(file.read_text(encoding="utf-8")) for kind, file in files.items() if file.exists()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(ON_IMAGES), help="comma-separated, as of `compare`; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "dials")
    parser.add_argument("--workers", type=int, help="runs at once; by default one a core")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    failures = [] if args.draw else train(args.methods.split(","), args.seeds, args.changes, args.out, args.workers)
    comparisons = finished(args.out)
    if not comparisons:
        parser.error(f"nothing is finished in {args.out}; {'; '.join(failures)}")
    draw(comparisons, args.picture)
    picture = Path(os.path.relpath(args.picture, args.page.parent)).as_posix()
    part = page_part(comparisons, load_experiment(EXPERIMENT, args.changes), picture)
    args.page.write_text(insert(args.page.read_text(encoding="utf-8"), part), encoding="utf-8")
    print("\n".join([f"{args.picture} drawn, {args.page} written", *failures]))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
