"""Methods on a frozen encoder, tuned, on real dermoscopy: by hospital, and by site of the body with two held out.

    python benchmarks/studies/clip.py sites|body [--seeds 5] [--out runs/ham10000_clip]

Writes docs/results/ham10000_clip.md or ham10000_clip_body.md. Finished runs are kept beside the page; stopped, the same
command goes on, on this machine or another.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import tuned

VARIANTS = tuple(tomllib.loads((tuned.HERE / "ham10000_clip.toml").read_text(encoding="utf-8"))["variants"])
# Sites of the body with 300 images or more; two smaller ones judge what is shared.
BODY = ("back", "lower extremity", "trunk", "upper extremity", "abdomen", "face", "chest", "foot")
HELD_OUT = ("neck", "unknown")
# The bodies' table has the plain and the balanced loss of each method.
SHORT = tuple(label for label in VARIANTS if not label.endswith("weighted"))


def quoted(names: tuple[str, ...]) -> str:
    """Names as a list in TOML."""
    return f"[{', '.join(repr(name) for name in names)}]"


STUDIES = {
    "sites": tuned.Study("ham10000_clip", [label for label in VARIANTS if label != "facmic"], trial_rounds=10),
    "body": tuned.Study(
        "ham10000_clip_body",
        SHORT,
        trial_rounds=10,
        experiment="ham10000_clip",
        settings=(
            "data.columns.site=localization",
            f"data.sites={quoted(BODY + HELD_OUT)}",
            f"data.held_out={quoted(HELD_OUT)}",
            f"methods.fedapt.domains={len(BODY)}",
        ),
    ),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    study = STUDIES[args.study]
    tuned.run(study, args.seeds, args.out or Path("runs") / study.name)


if __name__ == "__main__":
    main()
