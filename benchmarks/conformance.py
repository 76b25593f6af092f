"""Every method on every network of the conformance suite: the tests do the small ones, this does the large ones too.

    python benchmarks/conformance.py [--networks resnet18 ...] [--methods pafp ...] [--workers 2] [--out DIR]

The table has, of each method on each network, how many checks passed and how many do not apply; a broken promise is
printed below it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

import tables
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.registry import METHODS

SHARED_HEAD = ("ccvr",)  # calibrates a head that all clients have
ROUNDS = 2


def outcome(name: str, network: str) -> dict[str, str]:
    """The checks of one method on one network; `broken` has the message where a promise is broken."""
    torch.set_num_threads(1)
    shape = NETWORKS[network]
    if name in SHARED_HEAD:
        shape = replace(shape, head="shared")
    try:
        return check_method(METHODS[name](), shape, ROUNDS)
    except AssertionError as error:
        return {"broken": str(error)}


def cell(found: dict[str, str]) -> str:
    """A short form: passed and not applicable, or why all of them do not apply."""
    passed = sum(text == PASSED for text in found.values())
    if "broken" in found:
        return "BROKEN"
    return f"{passed} + {len(found) - passed}" if passed else "does not go"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.workers) as pool:
        waiting = {(m, n): pool.submit(outcome, m, n) for n in args.networks for m in args.methods}
        found = {pair: future.result() for pair, future in waiting.items()}
    rows = [[name, *(cell(found[name, network]) for network in args.networks)] for name in args.methods]
    tables.show("Checks passed + not applicable", ["", *args.networks], rows)
    broken = [
        f"{network}: {found[name, network]['broken']}" for name, network in found if "broken" in found[name, network]
    ]
    print(*broken, sep="\n")
    tables.write(args.out, "conformance", {f"{name} {network}": result for (name, network), result in found.items()})
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
