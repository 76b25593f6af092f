"""Keep a comparison's finished runs in one small file, and bring them back: for sweeps that outlast a machine.

    python benchmarks/studies/keep.py pack RUNS docs/results/NAME.tar.xz
    python benchmarks/studies/keep.py unpack docs/results/NAME.tar.xz RUNS

What is kept of a run: its configuration, environment, figures, logs, and which class its models predict for each test
image; no images, no weights, no probabilities. That is all that `wardround compare --out RUNS` needs to take a run for
finished, to test differences and to draw the report. Packing adds to a file that is there already; a run that both
have comes from the folder.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wardround.run_folder import CONFIG, ENVIRONMENT, RESULTS, ROSTER

TEXTS = (CONFIG, ENVIRONMENT, ROSTER, RESULTS, "metrics.jsonl", "messages.jsonl")
PATH = re.compile(r'^(path|fold_file|pretrained) = "/.*/([^/"]+)"$', re.MULTILINE)


def pack(runs: Path, file: Path) -> list[str]:
    """Write the finished runs below `runs` and those already in `file`; returns the runs' names."""
    entries = read(file) if file.exists() else {}
    for results in sorted(runs.glob(f"**/seed-*/{RESULTS}")):
        folder = results.parent
        name = folder.relative_to(runs).as_posix()
        entries = {key: content for key, content in entries.items() if run_of(key) != name}
        entries |= {f"{name}/{inner}": content for inner, content in run_files(folder)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz", preset=9 | lzma.PRESET_EXTREME) as archive:
        # Files of one kind stand together, so that what they share is stored once.
        for key in sorted(entries, key=lambda key: (key.rpartition("/")[2], key)):
            info = tarfile.TarInfo(key)
            info.size = len(entries[key])
            archive.addfile(info, io.BytesIO(entries[key]))
    return sorted(set(map(run_of, entries)))


def unpack(file: Path, runs: Path) -> None:
    """Bring back the runs that `runs` does not hold."""
    entries = read(file)
    there = {results.parent.relative_to(runs).as_posix() for results in runs.glob(f"**/seed-*/{RESULTS}")}
    for key, content in entries.items():
        if run_of(key) not in there:
            target = runs / key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def run_of(key: str) -> str:
    """The run that a file of an archive belongs to: `SYSTEM/seed-N`."""
    parts = key.split("/")
    return "/".join(parts[: 1 + next(i for i, part in enumerate(parts) if part.startswith("seed-"))])


def read(file: Path) -> dict[str, bytes]:
    """The files of an archive by name."""
    with tarfile.open(file, "r:xz") as archive:
        members = ((member, archive.extractfile(member)) for member in archive.getmembers())
        return {member.name: handle.read() for member, handle in members if handle is not None}


def run_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """What is kept of one run: names within its folder, and contents."""
    for name in TEXTS:
        if (folder / name).exists():
            yield name, _impersonal(name, (folder / name).read_text(encoding="utf-8")).encode()
    for path in sorted((folder / "predictions").glob("*.npz")):
        yield f"predictions/{path.name}", decisions(path)


def decisions(path: Path) -> bytes:
    """A file of predictions with 1 for the class that is predicted and 0 for the others, instead of logits."""
    buffer = io.BytesIO()
    with np.load(path, allow_pickle=False) as found:
        kept = {name: found[name] for name in ("names", "labels")}
        for name in sorted(set(found.files) - kept.keys()):
            kept[name] = np.eye(found[name].shape[1], dtype=np.int8)[found[name].argmax(axis=1)]
    np.savez(buffer, **kept)
    return buffer.getvalue()


def _impersonal(name: str, text: str) -> str:
    """Without folders of the machine, which decide no number."""
    if name == CONFIG:
        return PATH.sub(r'\1 = "\2"', text)
    if name == ENVIRONMENT:
        return json.dumps({key: value for key, value in json.loads(text).items() if key != "platform"}, indent=1)
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.what == "pack":
        names = pack(args.source, args.target)
        print(f"{args.target}: {len(names)} runs, {args.target.stat().st_size:,} bytes")
    else:
        unpack(args.source, args.target)


if __name__ == "__main__":
    main()
