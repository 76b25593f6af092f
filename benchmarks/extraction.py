"""Images a second through a frozen encoder: the package's cache beside a plain loop over the same network.

    python benchmarks/extraction.py [--images 256] [--turns 3] [--out DIR]

Both run the same weights on the same decoded images with the same batch, in turns, on one thread, and are timed by the
processor's clock. What the cache does besides: it checks that no feature is too large for its type, hashes images and
weights, and writes a file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import tables
from wardround.data import Samples
from wardround.data.federation import samples
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.training.allocation import keep_memory
from wardround.training.arithmetic import layout
from wardround.training.cache import PrefixCache
from wardround.training.inputs import PREFIX_BATCH
from wardround.training.options import TrainingOptions
from wardround.training.selftest import choose_arithmetic

ENCODERS = {"bridge:lite0-minilm": 224, "open_clip:ViT-B-32": 224}
CPU = torch.device("cpu")


def plain(model: Classifier, images: np.ndarray) -> torch.Tensor:
    """What anyone would write."""
    parts = []
    with torch.inference_mode():
        for start in range(0, len(images), PREFIX_BATCH):
            batch = torch.from_numpy(images[start : start + PREFIX_BATCH])
            parts.append(model.frozen(model.normalise(batch)))
    return torch.cat(parts)


def cached(model: Classifier, options: TrainingOptions, size: int, data: Samples) -> torch.Tensor:
    """The package's way, from a cold folder."""
    cache = PrefixCache(model, options, size, "none", 0, CPU, 2**31, Path(tempfile.mkdtemp()))
    return cache.inputs("benchmark", data, training=False).batch(torch.arange(len(data)), None)


def seconds(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Processor time and result."""
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


def measure(name: str, size: int, count: int, turns: int) -> dict[str, float | str]:
    """Both ways in turns; the features must be the same."""
    model = build_classifier(ModelOptions(backbone=name, pretrained=False, finetune_blocks=0), 7, 3, size, 0)
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    data = samples(images, np.zeros(count, np.int64), [str(i) for i in range(count)])
    auto = TrainingOptions(memory_format="auto", cache_type="float32")
    options = choose_arithmetic(model, auto, size, CPU, None)
    by_hand, ours = [], []
    for _ in range(turns):
        spent, expected = seconds(lambda: plain(model, images))
        by_hand.append(spent)
        model.to(memory_format=layout(options))
        spent, found = seconds(lambda: cached(model, options, size, data))
        ours.append(spent)
        model.to(memory_format=torch.contiguous_format)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    best = min(by_hand), min(ours)
    return {
        "encoder": name,
        "layout": options.memory_format,
        "plain_images_a_second": count / best[0],
        "images_a_second": count / best[1],
        "ratio": best[0] / best[1],
    }


def run(out: Path, count: int, turns: int) -> None:
    """Measure, print and keep the table."""
    torch.set_num_threads(1)
    keep_memory()
    rows = [measure(name, size, count, turns) for name, size in ENCODERS.items()]
    lines = [
        [str(row["encoder"]), str(row["layout"]), *(f"{row[key]:.1f}" for key in list(row)[2:4]), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    tables.show("Features", ["encoder", "layout", "plain, images/s", "ours, images/s", "ours / plain"], lines)
    tables.write(out, "extraction", rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    run(args.out, args.images, args.turns)


if __name__ == "__main__":
    main()
