"""Fifteen defects of the published code of FedMedCLIP and its baselines; each test fails on the defect.

Their numbers are those of the specification, section 10. Some have their own tests elsewhere, which are named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linear_trial import loaded
from wardround.data.options import DataOptions
from wardround.data.read import read_federation
from wardround.federation.rules import Owner
from wardround.methods.base import Method
from wardround.methods.clip_losses import certainty, entropy
from wardround.methods.cocoop import CoCoOp
from wardround.methods.facmic import FACMIC
from wardround.methods.fedclip import FedCLIP
from wardround.methods.fedlora import FedLoRA
from wardround.methods.fedmedclip import FedMedCLIP
from wardround.methods.fedprox import FedProx
from wardround.methods.moon import MOON
from wardround.methods.on_text import prompts_of
from wardround.methods.promptfl import PromptFL
from wardround.methods.trial import CLASSES, Network, Trial
from wardround.models.encoders import text
from wardround.models.masked_linear import MaskedLinear

ENCODER = Network("wardround:cnn", 20, 0, head="shared", dropout=0.0, text=True)
PAIR = ("large", "small")


def trial(method: Method, clients: tuple[str, ...] | Mapping[str, tuple[int, ...]] = PAIR, **training: object) -> Trial:
    return Trial(method, ENCODER, clients, optimizer="adamw", lr=1e-2, **training)  # type: ignore[arg-type]


def uploads(done: Trial, round: int) -> list[dict[str, torch.Tensor]]:
    return [visit.up.under("state") for visit in done.visits(round=round)]


def mean_of(states: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([state[name] for state in states]).mean(0)


def test_01_the_mask_learns() -> None:
    """Inert mask; a clip that returns its result to nobody. Also: tests/test_models_masked_linear.py."""
    done = trial(FedMedCLIP()).run(2)
    before, after = done.history.servers[0], done.history.servers[-1]
    thresholds = [name for name in before if name.endswith("threshold")]
    assert len(thresholds) == 2
    assert all(not torch.equal(before[name], after[name]) for name in thresholds)
    layer = MaskedLinear(4, 3)
    with torch.no_grad():
        layer.threshold.fill_(7.0)
    layer.settle()
    assert float(layer.threshold.detach().abs().max()) <= 5.0


def test_02_thresholds_travel_and_are_not_filled_up_from_a_stale_copy() -> None:
    done = trial(FedMedCLIP()).run(2)
    (name, *_) = [name for name in done.history.servers[0] if name.endswith("threshold")]
    expected = mean_of(uploads(done, 2), name)
    torch.testing.assert_close(done.history.servers[2][name], expected)
    assert all(name in visit.down.under("state") for visit in done.visits())
    torch.testing.assert_close(done.visits(round=2)[0].down.under("state")[name], mean_of(uploads(done, 1), name))


def test_03_the_encoder_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a client and round, and it looks at every image once."""
    seen = []
    done = trial(FedMedCLIP())
    prefix = type(done.model).prefix
    monkeypatch.setattr(type(done.model), "prefix", lambda self, x: (seen.append(len(x)), prefix(self, x))[1])
    monkeypatch.setattr("wardround.models.classifier.load_backbone", lambda *a, **k: pytest.fail("built again"))
    done.run(3)
    images = sum(len(client.train) + len(client.val) + len(client.test) for client in done.federation.clients)
    assert sum(seen) == images


def test_04_the_classifier_sees_vectors_of_length_one_wherever_it_is_asked() -> None:
    done = trial(FedMedCLIP()).run(1)
    client = loaded(done, "large")
    lengths = []
    client.model.head.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].norm(dim=1)))
    step = next(client.steps(1))
    assert done.method.loss(step).isfinite()
    done.method.predict(client, step.inputs)
    assert len(lengths) == 2
    for length in lengths:
        torch.testing.assert_close(length, torch.ones(len(length)))


def test_05_entropy_is_of_the_probabilities() -> None:
    """Softmaxed twice, alpha could not leave 0.311 to 0.689 for two classes."""
    sure, unsure = torch.tensor([[1.0 - 1e-7, 1e-7]]), torch.tensor([[0.5, 0.5]])
    assert float(certainty(sure, unsure, "true")) > 0.999
    assert float(certainty(sure, unsure, "reference")) < 0.69
    torch.testing.assert_close(entropy(unsure, "true"), torch.tensor([0.6931472]))
    assert FedMedCLIP().agreement == "entropy", "the divergence is weighed by it, as the paper says"


@pytest.mark.parametrize(("method", "count"), [(PromptFL(), 1), (PromptFL(context="class"), 1), (CoCoOp(), 5)])
def test_06_all_that_is_learned_of_a_prompt_is_averaged(method: Method, count: int) -> None:
    done = trial(method).run(1)
    names = done.side.rules.names(Owner.SHARED)
    assert len(names) == count, "the context, and CoCoOp's two layers"
    for name in names:
        states = uploads(done, 1)
        assert not torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(done.history.servers[1][name], mean_of(states, name))


def test_07_target_attention_weighs_target_features() -> None:
    """See tests/test_methods_facmic.py; here: whatever enters the adapter leaves it weighed by positive numbers.

    Features have either sign, so source features times another image's attention would not pass for the target's.
    """
    done = trial(FACMIC())
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    done.model.neck.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    centre = done.model.pool
    done.model.pool = torch.nn.Sequential(
        centre, torch.nn.LayerNorm(done.model.head.in_features, elementwise_affine=False)
    )
    done.run(1)
    assert len(seen) >= 2 * 5, "source and target in each of five steps"
    assert all(bool((before * after >= 0).all()) for before, after in seen)
    assert any(bool((before < 0).any()) for before, _ in seen)


def test_08_freezing_is_by_rule() -> None:
    """FedLoRA shares A and B alone, and nothing of an encoder moves under any of these methods."""
    vit = Network("timm:vit_tiny_patch16_224", 32, 1, head="shared", dropout=0.0)
    model = vit.model(FedLoRA())
    shared = FedLoRA().rules(model).names(Owner.SHARED)
    assert shared
    assert all(name.rpartition(".")[2] in {"a", "b", "A", "B"} or name.startswith("head.") for name in shared)
    for method in (FedMedCLIP(), FedCLIP(), PromptFL(), CoCoOp()):
        done = trial(method).run(1)
        assert not [n for visit in done.visits() for n in visit.changed if n.startswith(("frozen.", "prompts."))]


@pytest.mark.parametrize("method", [FedProx(mu=1.0), MOON(mu=1.0, projection=0)])
def test_09_references_are_copies(method: Method) -> None:
    """An alias of the model that trains would make the term constant: it must change what training does."""
    plain = method.model_copy(update={"mu": 0.0})
    tuned = Network("wardround:cnn", 20, 1, head="shared", dropout=0.0)
    ours, theirs = (Trial(each, tuned, PAIR).run(3).history.servers[-1] for each in (method, plain))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


def test_10_no_image_is_lost(tmp_path: Path) -> None:
    """Neither by the split, nor in the last batch, nor where a batch would hold one image."""
    lines = ["image,label,site"]
    for number in range(23):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'ab'[number % 2]},{'xy'[number > 10]}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    options = DataOptions(path=str(tmp_path), image_size=8, val_fraction=0.2, test_fraction=0.2)
    federation = read_federation(options, 0)
    names = [n for c in federation.clients for s in (c.train, c.val, c.test) for n in s.names]
    assert len(names) == len(set(names)) == 23
    done = trial(FedMedCLIP(), {"a": (3, 3, 3, 0), "b": (1, 0, 0, 0)}).run(1)
    client = loaded(done, "a")
    assert sorted(len(step.labels) for step in client.steps(1)) == [4, 5]
    assert [len(step.labels) for step in loaded(done, "b").steps(1)] == [1]
    for name in ("a", "b"):
        data = done.federation.client(name).test
        assert len(done.answerer.logits(loaded(done, name), "test", data)) == len(data) == CLASSES


def test_11_a_missing_class_moves_no_index(tmp_path: Path) -> None:
    for site, labels in {"one": "abc", "two": "ac"}.items():
        for label in labels:
            (tmp_path / site / label).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / site / label / f"{number}.png")
    federation = read_federation(DataOptions(source="folders", path=str(tmp_path), image_size=8), 0)
    assert federation.classes == ("a", "b", "c")
    assert sorted(set(federation.client("two").train.labels.tolist())) == [0, 2]


def test_12_a_patient_is_in_one_split(tmp_path: Path) -> None:
    lines = ["image,label,site,patient_id"]
    for number in range(60):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'ab'[number % 2]},x,p{number // 4}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    (client,) = read_federation(DataOptions(path=str(tmp_path), image_size=8), 0).clients
    patients = [
        {int(name.removesuffix(".png")) // 4 for name in s.names} for s in (client.train, client.val, client.test)
    ]
    assert not patients[0] & patients[1]
    assert not patients[0] & patients[2]
    assert not patients[1] & patients[2]


@pytest.mark.parametrize("clients", [1, 3, 5])
def test_13_any_number_of_clients_on_any_device(clients: int) -> None:
    counts = {f"site {number}": (2, 2, 0, 1) for number in range(clients)}
    done = trial(FedMedCLIP(), counts).run(1)
    assert {visit.client for visit in done.visits()} == set(counts)
    assert {tensor.device.type for tensor in done.history.servers[-1].values()} == {"cpu"}


def test_14_private_batch_norms_stay_as_their_client_left_them() -> None:
    """They are of the client's own attention, and are used with the averaged one, as the paper does: documented."""
    done = trial(FedMedCLIP()).run(2)
    first, second = (done.visits("large", round)[0] for round in (1, 2))
    statistics = [name for name in first.after if "running_mean" in name]
    assert statistics
    assert all(torch.equal(first.after[name], second.before[name]) for name in statistics)
    assert "received FAM with the client's own MLP" in (FedMedCLIP.__doc__ or "")


def test_15_an_average_is_of_this_rounds_clients_alone() -> None:
    """Not of a list that is never cleared, nor of one live state several times. LoRA's B: test_methods_fedlora.py."""
    done = trial(PromptFL()).run(3)
    (name,) = done.side.rules.names(Owner.SHARED)
    for round in (1, 2, 3):
        torch.testing.assert_close(done.history.servers[round][name], mean_of(uploads(done, round), name))


def test_the_losses_of_a_client_without_some_class_are_finite() -> None:
    for method in (FedMedCLIP(), FedMedCLIP(contrastive="supervised"), FedCLIP(), FACMIC()):
        done = trial(method, {"one class": (0, 6, 0, 0), "others": (2, 0, 2, 2)}).run(2)
        assert all(tensor.isfinite().all() for tensor in done.history.servers[-1].values())


def test_a_text_side_of_another_width_is_impossible() -> None:
    """Prompts and features have one length, whatever the encoder."""
    done = trial(FedCLIP())
    assert prompts_of(done.model).vectors.shape == (CLASSES, done.model.head.in_features)
    assert issubclass(type(prompts_of(done.model).tower), text.TextTower)


@pytest.mark.parametrize(
    ("switches", "logged"),
    [
        ({}, {"contrastive_loss", "mlp_loss", "agreement_loss"}),
        ({"contrastive": "none"}, {"mlp_loss", "agreement_loss"}),
        ({"private_mlp": False}, {"contrastive_loss"}),
    ],
)
def test_losses_are_logged_under_their_own_names(switches: dict[str, object], logged: set[str]) -> None:
    done = trial(FedMedCLIP(**switches)).run(1)  # type: ignore[arg-type]
    client = loaded(done, "large")
    step = next(client.steps(1))
    done.method.loss(step)
    assert {name for name in client.log if name.endswith("_loss")} == logged
    if "mlp_loss" in logged:
        assert client.log["mlp_loss"] == pytest.approx(float(step.task_loss.detach()))
