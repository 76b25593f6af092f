"""Every benchmark, one after the other: `python benchmarks/run.py --all`, or name those you want.

    python benchmarks/run.py [--all] [rounds] [memory] [steps] [methods] [frozen] [extraction] [--quick] [--out DIR]

Prints tables and writes JSON. Each part can be run alone, with more choices: see rounds.py, steps.py, methods.py,
frozen.py and extraction.py. parity.py is not among them: it needs other people's code.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import extraction
import frozen
import methods
import rounds
import steps
import tables
from wardround.methods.registry import METHODS

PARTS = ("rounds", "memory", "steps", "methods", "frozen", "extraction")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, to see that everything works")
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    chosen = PARTS if args.all else args.parts
    if not chosen or not set(chosen) <= set(PARTS):
        parser.error(f"name one of {', '.join(PARTS)}, or give --all")
    if {"rounds", "memory"} & set(chosen):
        only = list(rounds.WORKLOADS) if "rounds" in chosen else []
        rounds.run(args.out, 3 if args.quick else 12, [1, 2], only, "memory" in chosen)
    if "steps" in chosen:
        plan = steps.Plan(list(steps.SHAPES))
        few = dataclasses.replace(plan, repetitions=1, batches=1, arithmetic=False)
        steps.run(args.out, few if args.quick else plan)
    if "methods" in chosen:
        load = rounds.Workload("small", 3, 20) if args.quick else rounds.WORKLOADS["W1"]
        methods.run(args.out, list(METHODS), load, 1 if args.quick else 7, [2, 6] if args.quick else [20, 500])
    if "frozen" in chosen:
        frozen.run(args.out, 1 if args.quick else 10, [1, 2], list(frozen.CHOICES))
    if "extraction" in chosen:
        extraction.run(args.out, 64 if args.quick else 256, 1 if args.quick else 3)


if __name__ == "__main__":
    main()
