"""Made-up run and compare folders in the exact form that an experiment writes, for the tests of the report.

The figures come from a small learner's caricature: each client's chance of naming the right class rises with the
rounds, by a speed that depends on the method, and every metric is then counted from drawn confusion matrices, so
that scores, supports and matrices agree with one another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation import ClientData, Federation, samples
from wardround.evaluation.results import client_results, merge_results, summarise
from wardround.evaluation.significance import compare_methods
from wardround.skew.analyse import analyse_skew

CLASSES = ("melanoma", "naevus", "basal cell", "keratosis", "vascular")
MIXES = np.array(
    [
        [0.15, 0.35, 0.25, 0.20, 0.05],
        [0.02, 0.92, 0.00, 0.04, 0.02],
        [0.25, 0.50, 0.10, 0.15, 0.00],
        [0.20, 0.60, 0.00, 0.20, 0.00],
    ]
)


@dataclass(frozen=True)
class Method:
    """One made-up method: its label, how well it ends, and whether it shares weights and statistics."""

    name: str
    label: str
    skill: float
    shares: bool = True
    statistics: bool = False

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return self.label.replace(" ", "-").replace("=", "")


METHODS = (
    Method("isolated", "isolated", 0.48, shares=False),
    Method("fedavg", "ft-2B", 0.60),
    Method("pafp", "pafp", 0.66, statistics=True),
    Method("pafp-alt", "pafp-alt T=2", 0.70, statistics=True),
)


@dataclass(frozen=True)
class World:
    """What all made-up runs of one folder have in common."""

    clients: tuple[str, ...] = ("rosendahl", "vidir_molemax", "vidir_modern", "vienna_dias")
    sizes: tuple[int, ...] = (900, 700, 400, 80)
    classes: tuple[str, ...] = CLASSES
    rounds: int = 20
    views: int = 0

    def counts(self, split: str) -> NDArray[np.int64]:
        """Images per client and class `(clients, classes)`; validation is a tenth of train and test a quarter."""
        share = {"train": 1.0, "val": 0.1, "test": 0.25}[split]
        mixes = MIXES[np.arange(len(self.clients)) % len(MIXES), : len(self.classes)]
        counts = np.ceil(mixes * np.asarray(self.sizes)[: len(self.clients), None] * share)
        return counts.astype(np.int64)


def scores(support: NDArray[np.int64], skill: float, rng: np.random.Generator) -> dict[str, Any]:
    """METRICS counted from one drawn confusion matrix with `support[c]` images of class c."""
    classes = len(support)
    confusion = np.stack(
        [
            rng.multinomial(n, np.full(classes, (1 - skill) / classes) + skill * (np.arange(classes) == c))
            for c, n in enumerate(support)
        ]
    )
    hits, present = np.diag(confusion), support > 0
    predicted = confusion.sum(0)
    return {
        "n": int(support.sum()),
        "accuracy": float(hits.sum() / support.sum()),
        "balanced_accuracy": float((hits[present] / support[present]).mean()),
        "macro_f1": float((2 * hits[present] / (support + predicted)[present]).mean()),
        "auroc": None if present.sum() < 2 else 0.5 + skill / 2.2,
        "ece": 0.08,
        "support": support.tolist(),
        "confusion": confusion.tolist(),
    }


def skill_at(method: Method, client: int, done: int, rounds: int) -> float:
    """The chance of a right answer after `done` of `rounds` rounds; later clients find the task harder."""
    return float(method.skill * (1 - np.exp(-4 * done / rounds)) * (1 - 0.06 * client))


def client_lines(world: World, method: Method, k: int, round: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The metrics lines of client number `k` in `round`: the model that it received, then its own."""

    def both(skill: float) -> dict[str, Any]:
        return {split: scores(world.counts(split)[k], skill, rng) for split in ("test", "val")}

    skill = skill_at(method, k, round, world.rounds)
    lines: list[dict[str, Any]] = []
    if method.shares and round > 1:
        received = {"round": round - 1, **both(skill * 0.95)}
        lines.append({"round": round - 1, "client": world.clients[k], "received": received})
    log = {}
    if method.statistics and round > 1:
        log = {
            "alignment_loss": float(0.8 * np.exp(-round / 6) * rng.uniform(0.8, 1.2)),
            "alignment_gradient_ratio": float(10 ** (-1.5 - round / 20) * rng.uniform(0.7, 1.4)),
        }
    own = {
        "round": round,
        "client": world.clients[k],
        "examples": int(world.counts("train")[k].sum()),
        "seconds": 1.0 + k / 10,
        "train_loss": float(np.exp(-round / 8) + 0.05 * rng.random()),
        "personal": both(skill),
        "log": log,
        "refused": None,
    }
    return [*lines, own]


def jsonl(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_federation(folder: Path, world: World) -> None:
    """Write `federation.json`."""
    document = {
        "source": "phantoms",
        "classes": list(world.classes),
        "modalities": ["dermoscopy"],
        "notes": ["Two images could not be decoded and were skipped."],
        "clients": [
            {"name": name, "counts": {s: world.counts(s)[k].tolist() for s in ("train", "val", "test")}}
            for k, name in enumerate(world.clients)
        ],
    }
    (folder / "federation.json").write_text(json.dumps(document), encoding="utf-8")


def metric_lines(
    world: World, method: Method, seed: int, rounds: int, refused: Sequence[tuple[int, int, str]] = ()
) -> list[dict[str, Any]]:
    """All lines of `metrics.jsonl` for the first `rounds` rounds; a run's last round is followed by an evaluation."""
    rng = np.random.default_rng([seed, len(method.label)])
    lines: list[dict[str, Any]] = []
    for round in range(1, rounds + 1):
        for k in range(len(world.clients)):
            lines += client_lines(world, method, k, round, rng)
            reasons = [reason for when, who, reason in refused if (when, who) == (round, k)]
            if reasons:
                lines[-1] = {"round": round, "client": world.clients[k], "refused": reasons[0]}
        server = {f"statistic_distance/{site}": float(np.exp(-round / 9)) for site in range(2 * method.statistics)}
        lines.append({"round": round, "server": server, "seconds": 0.02})
    if rounds == world.rounds and method.shares:
        every = (client_lines(world, method, k, rounds + 1, rng)[0] for k in range(len(world.clients)))
        lines += every
    return lines


def message_lines(world: World, method: Method, rounds: int) -> list[dict[str, Any]]:
    """All lines of `messages.jsonl`; empty for a method that shares nothing."""
    size = 4 * (120_000 + (5_600 if method.statistics else 0)) * method.shares
    return [
        {"round": round, "client": name, "direction": way, "bytes": size + 310}
        for round in range(1, rounds + 1)
        for name in world.clients
        for way in ("down", "up")
        if method.shares
    ]


def final(lines: Sequence[dict[str, Any]], which: str) -> dict[str, dict[str, Any]]:
    """The last METRICS on test images of each client's model `which`."""
    return {line["client"]: line[which]["test"] for line in lines if line.get(which)}


def score_table(world: World, finals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`clients` and `summary` of one run's results file."""
    trained = dict(zip(world.clients, world.counts("train").sum(1).tolist(), strict=True))
    runs: dict[str, list[Any]] = {client: [metrics] for client, metrics in finals.items()}
    clients = {client: client_results(metrics, trained[client]) for client, metrics in runs.items()}
    return {"clients": clients, "summary": summarise(runs, trained)}


def run_results(
    world: World, method: Method, seed: int, refused: Sequence[tuple[int, int, str]] = ()
) -> dict[str, Any]:
    """`results.json` of one finished run, counted from the lines that its folder holds."""
    lines = metric_lines(world, method, seed, world.rounds, refused)
    total = sum(m["bytes"] for m in message_lines(world, method, world.rounds)) // 2
    few = [name for name, n in zip(world.clients, world.counts("train").sum(1), strict=True) if n < 100]
    cautions = [f"Statistics leave clients with fewer than 100 training images: {', '.join(few)}."]
    return {
        "method": method.name,
        "label": method.label,
        "seeds": [seed],
        "rounds": world.rounds,
        **score_table(world, final(lines, "personal")),
        "global": score_table(world, final(lines, "received")) if method.shares else None,
        "communication": {
            "bytes_up": total,
            "bytes_down": total,
            "shared_elements": 120_000 * method.shares,
            "statistic_elements": 5_600 * method.statistics,
        },
        "parameters": {"shared": 118_000 * method.shares, "local": 400 + 118_000 * (not method.shares), "frozen": 0},
        "seconds": {"setup": 2.0, "train": 61.0, "evaluate": 9.5, "total": 44.0},
        "warnings": [
            *(cautions if few and method.statistics else []),
            *(f"round {round}, {world.clients[k]}: {reason}" for round, k, reason in refused),
        ],
    }


def write_run(
    folder: Path,
    world: World | None = None,
    method: Method = METHODS[3],
    seed: int = 0,
    finished_rounds: int | None = None,
    refused: Sequence[tuple[int, int, str]] = (),
) -> Path:
    """Write one run folder.

    Args:
        finished_rounds: stop after that many rounds and leave `results.json` out, as a killed run does.
        refused: (round, client number, reason) of updates that the server turned away.
    """
    world = world or World()
    folder.mkdir(parents=True, exist_ok=True)
    write_federation(folder, world)
    done = world.rounds if finished_rounds is None else finished_rounds
    lines = metric_lines(world, method, seed, done, refused)
    jsonl(folder / "metrics.jsonl", lines)
    jsonl(folder / "messages.jsonl", message_lines(world, method, done))
    training = f'[training]\nprecision = "float32"\naugment_views = {world.views}\n'
    config = f'seed = {seed}\nrounds = {world.rounds}\n\n{training}\n[method]\nname = "{method.name}"\n'
    (folder / "config.toml").write_text(config, encoding="utf-8")
    environment = {"wardround": "0.1.0", "python": "3.12.3", "torch": "2.5.1", "threads": 1}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    if finished_rounds is None:
        found = json.dumps(run_results(world, method, seed, refused))
        (folder / "results.json").write_text(found, encoding="utf-8")
    return folder


def predictions(world: World, method: Method, seed: int) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Labels and logits of each client's test images that give the confusion matrices of the final round."""
    found = {}
    for client, metrics in final(metric_lines(world, method, seed, world.rounds), "personal").items():
        counts = np.array(metrics["confusion"])
        true, predicted = (np.repeat(axis, counts.ravel()) for axis in np.indices(counts.shape).reshape(2, -1))
        found[client] = (true, np.eye(len(counts))[predicted])
    return found


def comparison(world: World, methods: Sequence[Method], seeds: Sequence[int], draws: int = 100) -> dict[str, Any]:
    """The comparison document of the made-up methods."""
    weights = dict(zip(world.clients, world.counts("train").sum(1).tolist(), strict=True))
    found = {m.label: {seed: predictions(world, m, seed) for seed in seeds} for m in methods}
    return compare_methods(found, weights, draws=draws)


def write_skew(folder: Path, world: World) -> None:
    """Write `skew/skew.json` of a tiny federation with `world`'s names, from made-up features."""

    def features(samples: Any) -> NDArray[np.float64]:
        rng = np.random.default_rng(len(samples))
        return rng.normal(samples.images.mean((1, 2)), 20.0)

    found = analyse_skew(tiny_federation(world), features, seed=0, permutations=20)
    (folder / "skew").mkdir()
    (folder / "skew" / "skew.json").write_text(json.dumps(found), encoding="utf-8")


def write_compare(
    folder: Path,
    world: World | None = None,
    methods: Sequence[Method] = METHODS,
    seeds: Sequence[int] = (0, 1, 2),
) -> Path:
    """Write one compare folder with a run folder for each method and seed."""
    world = world or World()
    folder.mkdir(parents=True, exist_ok=True)
    write_federation(folder, world)
    for method in methods:
        for seed in seeds:
            write_run(folder / method.slug / f"seed-{seed}", world, method, seed)
        merged = json.dumps(merge_results([run_results(world, method, seed) for seed in seeds]))
        (folder / method.slug / "results.json").write_text(merged, encoding="utf-8")
    compared = json.dumps(comparison(world, methods, seeds))
    (folder / "comparison.json").write_text(compared, encoding="utf-8")
    return folder


def tiny_federation(world: World | None = None, side: int = 12, channels: int = 3) -> Federation:
    """A federation of flat images whose grey level is their class, with `world`'s names and a tenth of its sizes."""
    world = world or World()

    def split(client: int, name: str) -> Any:
        counts = world.counts(name)[client] // 10
        labels = np.repeat(np.arange(len(counts)), counts)
        images = np.broadcast_to((40 + 40 * labels)[:, None, None, None], (len(labels), side, side, channels)).astype(
            np.uint8
        )
        return samples(images, labels, [f"{client}/{name}/{i}" for i in range(len(labels))])

    clients = tuple(
        ClientData(name, split(k, "train"), split(k, "val"), split(k, "test")) for k, name in enumerate(world.clients)
    )
    return Federation(clients, world.classes, "phantoms")
