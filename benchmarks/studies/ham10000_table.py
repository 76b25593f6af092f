"""The tuned table of every method on four real dermoscopy sites: docs/results/ham10000_sites.md.

    python benchmarks/studies/ham10000_table.py [--seeds 5] [--out runs/ham10000_table]

Tunes every method on validation images with the same budget, compares the tuned methods over the seeds, and writes the
page. It takes hours. Stop it whenever you like: finished runs are kept in docs/results/ham10000_sites.tar.xz, and the
same command goes on from there, on this machine or another. With fewer seeds it writes a page of fewer seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keep

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "results"
EXPERIMENT, PAGE, KEPT = HERE / "ham10000_table.toml", RESULTS / "ham10000_sites.md", RESULTS / "ham10000_sites.tar.xz"
TRIAL_ROUNDS = 5
METHODS = (
    *("isolated", "ft-2b", "finetune", "fedhealth", "fedprox", "scaffold", "moon", "fedlc", "ccvr", "fedbn", "fedper"),
    *("fedrep", "fedproto", "ditto", "per-fedavg", "fedrod", "dbe", "fedco2", "fdse"),
    *("pafp", "pafp + lc", "pafp-alt", "pafp-alt + lc"),
)


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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ham10000_table"))
    args = parser.parse_args()
    tuned, compared, names = args.out / "tune", args.out / "compare", ",".join(METHODS)
    if KEPT.exists():
        keep.unpack(KEPT, args.out)
    try:
        wardround("tune", EXPERIMENT, "--methods", names, "--rounds", TRIAL_ROUNDS, "--out", tuned)
        wardround(
            "compare", tuned / "tuned.toml", "--methods", names, "--seeds", args.seeds, "--out", compared, "--no-skew"
        )
        wardround("report", compared, "--markdown", PAGE)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        keep.pack(args.out, KEPT)
    tuning = json.loads((tuned / "tuning.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8") + "\n" + "\n\n".join(settings(tuning)) + "\n"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
