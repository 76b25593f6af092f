"""The tuned table of every method on four real dermoscopy sites: docs/results/ham10000_sites.md.

    python benchmarks/studies/ham10000_table.py [--seeds 5] [--out runs/ham10000_table]

Tunes every method on validation images with the same budget, compares the tuned methods over the seeds, and writes the
page. It takes hours. Stop it whenever you like: finished runs are kept in docs/results/ham10000_sites.tar.xz, and the
same command goes on from there, on this machine or another. With fewer seeds it writes a page of fewer seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tuned

METHODS = (
    *("isolated", "ft-2b", "finetune", "fedhealth", "fedprox", "scaffold", "moon", "fedlc", "ccvr", "fedbn", "fedper"),
    *("fedrep", "fedproto", "ditto", "per-fedavg", "fedrod", "dbe", "fedco2", "fdse"),
    *("pafp", "pafp + lc", "pafp-alt", "pafp-alt + lc"),
)
STUDY = tuned.Study("ham10000_sites", METHODS, trial_rounds=5, experiment="ham10000_table")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ham10000_table"))
    args = parser.parse_args()
    tuned.run(STUDY, args.seeds, args.out)


if __name__ == "__main__":
    main()
