"""Inputs: cached outputs of the frozen blocks equal the uncached ones, and every view has its stream."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from wardround import seeds
from wardround.data.federation import Samples, samples
from wardround.data.transforms import augment, centre_crop
from wardround.errors import InputError
from wardround.methods.base import FedAvg
from wardround.methods.pafp import PAFP
from wardround.methods.trial import Network, Trial
from wardround.models.classifier import Classifier
from wardround.training import cache as cache_module
from wardround.training.cache import PrefixCache
from wardround.training.inputs import CachedInputs, ImageInputs, prefix_outputs
from wardround.training.options import TrainingOptions

CPU = torch.device("cpu")
SIZE = 20
ROWS = torch.tensor([4, 0, 7, 2])


def classifier(depth: Any = 2) -> Classifier:
    return Network("wardround:cnn-bn", SIZE, depth).model(FedAvg())


def pictures(count: int = 9, seed: int = 0, size: int = SIZE + 4) -> Samples:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, size, size, 3)).astype(np.uint8)
    return samples(images, np.zeros(count, np.int64), [str(i) for i in range(count)])


def maker(
    model: Classifier, folder: Path | None = None, policy: Any = "none", budget: int = 2**30, **keys: Any
) -> PrefixCache:
    options = TrainingOptions(**{"cache_type": "float32", "memory_format": "contiguous"} | keys)
    return PrefixCache(model, options, SIZE, policy, 0, CPU, budget, folder)


def direct(model: Classifier, data: Samples, rows: Tensor) -> Tensor:
    """The frozen blocks on centre crops, with nothing of ours in between."""
    crops = torch.from_numpy(centre_crop(data.images, SIZE)[rows.numpy()].copy())
    with torch.no_grad():
        out: Tensor = model.frozen(model.prepare(crops))
    return out


# ---- equality with the uncached run


@pytest.mark.parametrize("kind", [CachedInputs, ImageInputs])
def test_a_batch_is_what_the_frozen_blocks_put_out(kind: type) -> None:
    model, data = classifier(), pictures()
    inputs = maker(model, cache=kind is CachedInputs).inputs("a", data, training=True)
    assert isinstance(inputs, kind)
    torch.testing.assert_close(inputs.batch(ROWS, np.random.default_rng(0)), direct(model, data, ROWS))


@pytest.mark.parametrize(
    ("cache_type", "tolerance"),
    [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 2e-3)],
)
@pytest.mark.parametrize("method", [FedAvg(), PAFP(strength=0.1)])
@pytest.mark.parametrize("backbone", ["wardround:cnn-gn", "wardround:cnn-bn"])
def test_training_from_the_cache_equals_training_without(
    backbone: str, method: FedAvg, cache_type: str, tolerance: float
) -> None:
    """Relative to the whole shared state, after three rounds, in which it moves at least four times as far.

    A float32 cache differs by the rounding of batches of another size alone. Half precisions keep 11 and 8 bits of
    each feature; training then drifts apart where a ReLU or a maximum falls the other way.
    """
    network = Network(backbone, SIZE, 2)
    runs = [
        Trial(method, network, ["large", "small"], lr=0.01, **keys).run(3).history.servers
        for keys in ({"cache": False}, {"cache_type": cache_type})
    ]
    names = [name for name, tensor in runs[0][0].items() if tensor.is_floating_point()]
    start, plain, cached = (
        torch.cat([state[name].flatten() for name in names]) for state in (runs[0][0], runs[0][-1], runs[1][-1])
    )
    assert (cached - plain).norm() <= tolerance * plain.norm()
    assert (plain - start).norm() > 4 * tolerance * plain.norm()  # else the comparison would say nothing


def test_outputs_too_large_for_the_cache_are_an_error() -> None:
    model = classifier()
    with torch.no_grad():
        model.frozen[0][0].weight.mul_(1e9)
        model.frozen[0][1].running_var.fill_(1e-4)
    with pytest.raises(InputError, match=r'cache_type = "float16" cannot hold .*allowed here: "bfloat16", "float32"'):
        maker(model, cache_type="float16").inputs("a", pictures(), training=True)
    assert torch.isfinite(maker(model).inputs("a", pictures(), training=True).batch(ROWS, None)).all()


@pytest.mark.parametrize("name", ["contiguous", "channels_last"])
def test_batches_have_the_layout_that_was_chosen(name: Any) -> None:
    """The self-test measures that layout; another one would be computed with at another speed."""
    batch = maker(classifier(), memory_format=name).inputs("a", pictures(), training=True).batch(ROWS, None)
    assert batch.is_contiguous(memory_format=getattr(torch, f"{name}_format" if name == "contiguous" else name))


def test_tokens_are_cached_as_they_are() -> None:
    model = Network("wardround:vit-tiny", SIZE, 2).model(FedAvg())
    batch = maker(model).inputs("a", pictures(), training=True).batch(ROWS, None)
    assert batch.dim() == 3
    torch.testing.assert_close(batch, direct(model, pictures(), ROWS))


# ---- when there is no cache


@pytest.mark.parametrize(
    ("depth", "count", "policy", "keys"),
    [(2, 9, "none", {"cache": False}), ("all", 9, "none", {}), (2, 0, "none", {}), (2, 9, "light", {})],
)
def test_cases_without_a_cache(depth: Any, count: int, policy: str, keys: dict[str, Any]) -> None:
    """It is off, nothing is frozen, there is no image, or images are augmented anew each time."""
    inputs = maker(classifier(depth), policy=policy, **keys).inputs("a", pictures(count), training=True)
    assert isinstance(inputs, ImageInputs)


def test_evaluation_is_never_augmented() -> None:
    model, data = classifier(), pictures()
    for keys in ({"cache": False}, {"augment_views": 2}, {}):
        inputs = maker(model, policy="light", **keys).inputs("a", data, training=False)
        torch.testing.assert_close(inputs.batch(ROWS, np.random.default_rng(0)), direct(model, data, ROWS))


# ---- augmentation


def test_augmentation_depends_on_its_stream_alone() -> None:
    model, data = classifier(), pictures()
    inputs = maker(model, policy="light").inputs("a", data, training=True)
    first, again, other = (inputs.batch(ROWS, seeds.numpy_stream(0, "augment", round)) for round in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(inputs.batch(ROWS, None), direct(model, data, ROWS))


def test_views_are_augmented_once_and_drawn_from() -> None:
    model, data = classifier(), pictures()
    inputs = maker(model, policy="light", augment_views=3).inputs("a", data, training=True)
    views = []
    for view in range(3):
        images = augment(data.images, "light", SIZE, seeds.numpy_stream(0, "view", view, "a"))
        with torch.no_grad():
            views.append(model.frozen(model.prepare(torch.from_numpy(images))))
    stack, seen = torch.stack(views), set()
    for draw in range(8):
        batch = inputs.batch(ROWS, np.random.default_rng(draw))
        distances = (stack[:, ROWS] - batch).flatten(2).norm(dim=2)
        assert (distances.min(0).values < 1e-3).all()
        seen |= set(distances.argmin(0).tolist())
    assert seen == {0, 1, 2}
    assert torch.equal(inputs.batch(ROWS, np.random.default_rng(1)), inputs.batch(ROWS, np.random.default_rng(1)))


def test_views_differ_between_clients_and_seeds() -> None:
    model, data = classifier(), pictures()
    outputs = [
        prefix_outputs(
            ImageInputs(model, data, SIZE, "light", CPU), seeds.numpy_stream(seed, "view", 0, client), torch.float32
        )
        for seed, client in ((0, "a"), (0, "b"), (1, "a"))
    ]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


# ---- files


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Image counts of every run of the frozen blocks."""
    runs: list[int] = []

    def spy(inputs: ImageInputs, *rest: Any) -> Tensor:
        runs.append(len(inputs.samples))
        return prefix_outputs(inputs, *rest)

    monkeypatch.setattr(cache_module, "prefix_outputs", spy)
    return runs


@pytest.mark.parametrize("cache_type", ["float16", "bfloat16", "float32"])
def test_a_second_run_reads_the_file_and_gets_the_same_bits(
    tmp_path: Path, counted: list[int], cache_type: str
) -> None:
    first = maker(classifier(), tmp_path, cache_type=cache_type).inputs("a", pictures(), training=True)
    second = maker(classifier(), tmp_path, cache_type=cache_type).inputs("b", pictures(), training=False)
    assert counted == [9]
    assert torch.equal(first.batch(ROWS, None), second.batch(ROWS, None))
    without = maker(classifier(), cache_type=cache_type).inputs("a", pictures(), training=True)
    assert torch.equal(first.batch(ROWS, None), without.batch(ROWS, None))


def other_weights(model: Classifier) -> None:
    next(model.frozen.parameters()).data[0] += 1


def other_statistics(model: Classifier) -> None:
    model.frozen[0][1].running_mean += 1


def other_normalisation(model: Classifier) -> None:
    model.normalise.shift += 0.1


@pytest.mark.parametrize("change", [other_weights, other_statistics, other_normalisation])
def test_another_model_is_computed_anew(tmp_path: Path, counted: list[int], change: Any) -> None:
    maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    model = classifier()
    with torch.no_grad():
        change(model)
    found = maker(model, tmp_path).inputs("a", pictures(), training=True)
    assert counted == [9, 9]
    torch.testing.assert_close(found.batch(ROWS, None), direct(model, pictures(), ROWS))


def test_other_images_types_and_depths_are_computed_anew(tmp_path: Path, counted: list[int]) -> None:
    maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    maker(classifier(), tmp_path).inputs("a", pictures(seed=1), training=True)
    maker(classifier(), tmp_path, cache_type="float16").inputs("a", pictures(), training=True)
    maker(classifier(1), tmp_path).inputs("a", pictures(), training=True)
    assert counted == [9, 9, 9, 9]


def test_the_tuned_blocks_do_not_matter(tmp_path: Path, counted: list[int]) -> None:
    """All methods and seeds with the same frozen weights share one file."""
    maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    model = Network("wardround:cnn-bn", SIZE, 2).model(PAFP())
    with torch.no_grad():
        model.head.weight.zero_()
        next(model.tuned.parameters()).zero_()
    maker(model, tmp_path).inputs("a", pictures(), training=True)
    assert counted == [9]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what memory is a mapped file")
def test_beyond_the_budget_outputs_stay_in_the_file(tmp_path: Path) -> None:
    small = maker(classifier(), tmp_path, budget=0).inputs("a", pictures(), training=True)
    large = maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    assert torch.equal(small.batch(ROWS, None), large.batch(ROWS, None))
    (file,) = (tmp_path / "prefix").glob("*.safetensors")
    mapped, kept = (inputs.views[0] for inputs in (small, large))  # type: ignore[attr-defined]
    if Path("/proc/self/maps").exists():
        assert is_mapped(mapped, file)
        assert not is_mapped(kept, file)
    before = file.read_bytes()
    mapped[:] = 0  # what a careless caller does reaches no file
    assert file.read_bytes() == before


def is_mapped(tensor: Tensor, file: Path) -> bool:
    """Whether the tensor's memory is that of the file, as the system says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return last == str(file.resolve())
    return False


@pytest.mark.parametrize("damage", [b"", b"not an array", None])
def test_a_damaged_file_is_replaced(tmp_path: Path, counted: list[int], damage: bytes | None) -> None:
    maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    (file,) = (tmp_path / "prefix").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7] if damage is None else damage)
    found = maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    assert counted == [9, 9]
    torch.testing.assert_close(found.batch(ROWS, None), direct(classifier(), pictures(), ROWS))
    assert load_file(file)["outputs"].shape[0] == 9


def test_a_disk_that_takes_nothing_costs_time_and_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_atomically", full)
    found = maker(classifier(), tmp_path).inputs("a", pictures(), training=True)
    torch.testing.assert_close(found.batch(ROWS, None), direct(classifier(), pictures(), ROWS))


def test_views_have_files_of_their_own(tmp_path: Path, counted: list[int]) -> None:
    for client in ("a", "b", "a"):
        maker(classifier(), tmp_path, policy="light", augment_views=2).inputs(client, pictures(), training=True)
    assert counted == [9] * 4
    assert len(list((tmp_path / "prefix").glob("*.safetensors"))) == 4


def test_frozen_blocks_in_bfloat16_are_near_and_kept_apart(tmp_path: Path) -> None:
    """Cached and uncached alike; another precision never reads the file of this one."""
    model, data = classifier(), pictures()
    exact = maker(model, tmp_path).inputs("a", data, training=False).batch(ROWS, None)
    coarse = maker(model, tmp_path, frozen_precision="bfloat16").inputs("a", data, training=False).batch(ROWS, None)
    uncached = maker(model, cache=False, frozen_precision="bfloat16").inputs("a", data, training=False)
    assert coarse.dtype == torch.float32
    assert not torch.equal(exact, coarse)
    assert float((coarse - exact).norm() / exact.norm()) < 0.02
    torch.testing.assert_close(uncached.batch(ROWS, None), coarse, rtol=1e-2, atol=1e-2)
    assert len(list((tmp_path / "prefix").glob("*.safetensors"))) == 2


# ---- two processes that need the same


def test_a_second_process_waits_for_the_first_and_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for the processes: the lock is on the file, and each has an opened file of its own."""
    model, data, computed, begun = classifier(), pictures(), [], threading.Event()
    compute = PrefixCache._compute

    def slowly(self: PrefixCache, client: str, images: ImageInputs, view: int | None) -> Tensor:
        begun.set()
        found = compute(self, client, images, view)
        time.sleep(0.3)  # long enough for the other to look for the file and miss it
        computed.append(client)
        return found

    monkeypatch.setattr(PrefixCache, "_compute", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(maker(model, tmp_path).inputs, "a", data, training=False)
        assert begun.wait(60)
        second = pool.submit(maker(model, tmp_path).inputs, "a", data, training=False)
        batches = [done.result(60).batch(ROWS, None) for done in (first, second)]
    assert computed == ["a"]
    assert torch.equal(*batches)


def test_the_lock_of_a_process_that_died_holds_nobody_up(tmp_path: Path) -> None:
    model, data = classifier(), pictures()
    maker(model, tmp_path).inputs("a", data, training=False)
    (file,) = tmp_path.glob("prefix/*.safetensors")
    file.unlink()
    code = "import os, sys; from filelock import FileLock; FileLock(sys.argv[1]).acquire(); os._exit(1)"
    assert subprocess.run([sys.executable, "-c", code, f"{file}.lock"], check=False).returncode == 1
    maker(model, tmp_path).inputs("a", data, training=False)
    assert file.exists()


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("in the way")
    inputs = maker(classifier(), tmp_path).inputs("a", pictures(), training=False)
    assert len(inputs.batch(ROWS, None)) == len(ROWS)
