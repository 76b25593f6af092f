"""Captions in training: what a step is told and what it minimises, with which methods, and what never is told."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from linear_trial import loaded
from wardround.answering import told
from wardround.captions.book import CaptionBook
from wardround.captions.caption import Caption
from wardround.captions.embedding import embed
from wardround.captions.gathering import KnownNames
from wardround.captions.inserting import insert_captions
from wardround.captions.options import CaptionOptions
from wardround.captions.text_encoders import WordVectors
from wardround.config import Experiment, experiment_from
from wardround.data.options import DataOptions
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.federation.rules import Owner
from wardround.methods.base import FedAvg, Method
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.fedlc import FedLC
from wardround.methods.fedrod import FedRoD
from wardround.methods.fm2 import FM2, mixtures
from wardround.methods.moon import reference_features
from wardround.methods.registry import METHODS
from wardround.methods.trial import Network, Trial
from wardround.models.caption_fusion import CaptionedPool, telling
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.training.client import Client, Step
from wardround.training.inputs import CachedInputs, SometimesTold

TEMPLATES = CaptionOptions(provider="template", text_encoder="tiny", width=16)
TABLE = ("fm2", "fedavg", "fedprox", "fedbn", "fedrep", "fedproto", "per-fedavg")
"""FM² and the methods that the paper trains with captions too (its table 3)."""


def network(options: CaptionOptions = TEMPLATES, **more: Any) -> Network:
    return replace(NETWORKS["captioned"], captions=options, **more)


def pool_of(model: Classifier) -> CaptionedPool:
    assert isinstance(model.pool, CaptionedPool)
    return model.pool


def a_client(method: Method, options: CaptionOptions = TEMPLATES, name: str = "large") -> Client:
    """A client as it begins its first round, without dropout."""
    return loaded(Trial(method, network(options, dropout=0.0), [name]), name)


def first_step(client: Client) -> Step:
    return next(iter(client.steps(1)))


# The network.


def bare() -> Classifier:
    options = ModelOptions(backbone="wardround:cnn-bn", pretrained=False, finetune_blocks=2)
    return build_classifier(options, 4, 3, 20, seed=0)


def test_what_is_shared_does_not_depend_on_the_text_encoder() -> None:
    """Clients may have different ones, a server has none."""
    models = []
    for text_features in (None, 128, 384):
        models.append(bare())
        insert_captions(models[-1], TEMPLATES, text_features, seed=1)
    states = [FedAvg().rules(model).pick(model.state_dict(), Owner.SHARED) for model in models]
    assert any(name.startswith("pool.fusion") for name in states[0])
    assert not any(name.startswith("pool.text") for name in states[2])
    assert FedAvg().rules(models[2]).names(Owner.LOCAL)[:2] == ("pool.text.weight", "pool.text.bias")
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())
    assert models[0].head.in_features == TEMPLATES.width
    other = bare()
    insert_captions(other, TEMPLATES, None, seed=2)
    assert not torch.equal(other.head.weight, models[0].head.weight)


def test_without_fusion_features_and_head_stay_as_they_are() -> None:
    model, before = bare().eval(), bare().eval()
    insert_captions(model, TEMPLATES.model_copy(update={"fusion": False}), 128, seed=1)
    h = torch.randn(2, *model.site_shapes(20)[0])
    assert torch.equal(model(h), before(h))


# A step.


def test_a_step_minimises_the_task_loss_and_alpha_times_the_contrastive_loss() -> None:
    """v and t are computed here from the projections alone, the loss by its formula."""
    options = TEMPLATES.model_copy(update={"alpha": 0.3, "temperature": 0.2, "multi_positive": False})
    client = a_client(FedAvg(), options)
    step, pool = first_step(client), pool_of(client.model)
    assert client.captions is not None
    assert step.captions is not None
    maps = client.model.tuned[0](step.inputs)
    assert maps.shape[2:] == (8, 8)
    v = functional.normalize(pool.image(maps.flatten(2).mean(2)), dim=1)
    t = functional.normalize(pool.text(step.captions.sentences()), dim=1)
    cosines = (v @ t.T / 0.2).double().detach().numpy()
    contrast = -np.mean([row[j] - np.log(np.exp(row).sum()) for j, row in enumerate(cosines)])
    task = client.task_loss(step.logits, step.labels)
    assert step.task_loss.item() == pytest.approx(task.item() + 0.3 * contrast, rel=1e-5)
    assert client.log["caption_loss"] == pytest.approx(contrast, rel=1e-5)
    assert FedAvg().loss(step).item() == step.task_loss.item()
    with telling(client.model, step.captions):
        assert torch.equal(client.model(step.inputs), step.logits)
    assert not torch.allclose(client.model(step.inputs), step.logits)


def test_features_and_logits_of_a_step_share_one_forward_pass() -> None:
    client = a_client(FedAvg())
    step = first_step(client)
    with torch.no_grad():
        expected = first_step(client).logits
        features = step.features
        assert torch.equal(step.logits, client.model.classify(features))
    torch.testing.assert_close(step.logits, expected)
    assert step.heard is not None


def test_the_logged_loss_is_the_mean_over_batches() -> None:
    client = a_client(FedAvg())
    steps = list(client.steps(1))
    losses = [step.caption_loss for step in steps]
    assert len(losses) == 3
    assert all(step.caption_loss is loss for step, loss in zip(steps, losses, strict=True)), "computed once"
    assert client.log["caption_loss"] == pytest.approx(np.mean([loss.item() for loss in losses if loss is not None]))


@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"coverage": 0.0}])
def test_without_weight_or_captions_the_loss_is_the_tasks(changes: dict[str, Any]) -> None:
    client = a_client(FedAvg(), TEMPLATES.model_copy(update=changes))
    step = first_step(client)
    assert (step.captions is None) == (client.captions is None) == ("coverage" in changes)
    assert torch.equal(step.task_loss, client.task_loss(step.logits, step.labels))
    assert "caption_loss" not in client.log


def test_with_one_caption_in_a_batch_there_is_nothing_to_tell_apart() -> None:
    client = a_client(FedAvg())
    step = first_step(client)
    assert step.captions is not None
    says = torch.full_like(step.captions.says, -1)
    mask = torch.zeros_like(step.captions.mask)
    says[0], mask[0] = step.captions.says[0], step.captions.mask[0]
    step.captions = replace(step.captions, says=says, mask=mask)
    assert torch.equal(step.task_loss, client.task_loss(step.logits, step.labels))


def test_a_step_is_split_with_its_captions() -> None:
    step = first_step(a_client(FedAvg()))
    assert step.captions is not None
    parts = step.split(2)
    kept = [part.captions for part in parts if part.captions is not None]
    assert [len(captions) for captions in kept] == [len(part.labels) for part in parts] == [2, 2]
    assert torch.equal(torch.cat([captions.says for captions in kept]), step.captions.says)
    assert torch.equal(kept[1].tokens, step.captions.tokens[2:])
    again = step.split(9)
    assert len(again) == 9
    assert all(part.captions is step.captions for part in again)


@pytest.mark.parametrize("method", [FedLC(), FedRoD()], ids=["fedlc", "fedrod"])
def test_a_loss_that_is_not_the_task_loss_has_the_contrastive_loss_too(method: Method) -> None:
    with_loss, without = (a_client(method, TEMPLATES.model_copy(update={"alpha": alpha})) for alpha in (0.5, 0.0))
    step, same = first_step(with_loss), first_step(without)
    contrast = step.caption_loss
    assert contrast is not None
    torch.testing.assert_close(method.loss(step), method.loss(same) + 0.5 * contrast)


def test_references_see_what_the_model_sees() -> None:
    client = a_client(FedAvg())
    twin, step = client.reference(), first_step(client)
    with torch.no_grad():
        torch.testing.assert_close(reference_features(twin, step), step.features)
        assert not torch.allclose(twin.features(step.inputs), step.features)


# FM².


def test_fm2_hears_captions_in_stage_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores and stage 2 are of images alone, and stage 2 moves nothing that captions enter."""
    client = a_client(FM2(top_k=2))
    pool = pool_of(client.model)
    before = copy.deepcopy(pool.state_dict())
    alone = client.training_features()
    subset = FM2(top_k=2).subset(client)
    assert subset.captions is None
    step = next(iter(subset.steps(1)))
    assert step.captions is None
    assert all(any(torch.equal(row, known) for known in alone) for row in step.inputs)
    FM2(top_k=2).train_mixtures(subset)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pool.state_dict().items())
    assert "caption_loss" not in client.log
    FM2(top_k=2).train(client, "train")
    assert client.log["caption_loss"] > 0
    assert not torch.equal(pool.state_dict()["text.weight"], before["text.weight"])
    assert not torch.equal(pool.state_dict()["image.weight"], before["image.weight"])


def test_fm2s_mixtures_may_train_on_fused_features_too() -> None:
    """Each image's caption is hidden as often as captions.dropout says; the chosen images stay the same."""
    options = TEMPLATES.model_copy(update={"in_mixtures": True, "dropout": 0.25})
    client = a_client(FM2(), options)
    alone, fused = client.training_features(), client.training_features(told=True)
    subset, plain = FM2().subset(client), FM2().subset(replace(client, captions=None))
    assert isinstance(subset.inputs, SometimesTold)
    assert torch.equal(subset.labels, plain.labels)
    rows = torch.arange(len(client))
    assert torch.equal(subset.inputs.batch(rows, None), alone)
    assert not torch.isclose(alone, fused).all(1).any()
    stream, hidden = np.random.default_rng(0), []
    for _ in range(400):
        batch = subset.inputs.batch(rows, stream)
        is_alone, is_fused = ((batch == known).all(1) for known in (alone, fused))
        assert bool((is_alone ^ is_fused).all())
        hidden.append(float(is_alone.float().mean()))
    assert np.mean(hidden) == pytest.approx(0.25, abs=0.02)
    assert len(subset.inputs) == len(client)


def test_hiding_nothing_and_everything() -> None:
    alone, fused = (CachedInputs([torch.randn(5, 3)], torch.device("cpu"), torch.contiguous_format) for _ in range(2))
    rows = torch.tensor([4, 0])
    for hidden, expected in ((0.0, fused), (1.0, alone)):
        found = SometimesTold(alone, fused, hidden).batch(rows, np.random.default_rng(0))
        assert torch.equal(found, expected.views[0][rows])


def test_the_mixtures_stand_on_the_fused_width() -> None:
    client = a_client(FM2())
    assert client.training_features().shape == (len(client), TEMPLATES.width)
    first = next(m for m in mixtures(client.model).domain.modules() if isinstance(m, nn.Linear))
    assert TEMPLATES.width in first.weight.shape


# Every method of the paper's table.


@pytest.fixture(scope="module")
def hearings() -> Mapping[str, Any]:
    """What the pool heard in a run of each method: by method, pairs of (captions were told, the pool was training)."""
    forward, found = CaptionedPool.forward, dict[str, Any]()
    noted: list[tuple[bool, bool]] = []

    def noting(self: CaptionedPool, h: Tensor) -> Tensor:
        noted.append((self._ear.heard is not None, self.training))
        return forward(self, h)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptionedPool, "forward", noting)
        for name in TABLE:
            noted.clear()
            trial = Trial(METHODS[name](), network(), ["large", "small"]).run(2)
            found[name] = trial, list(noted)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_the_network_is_told_captions_in_training_steps_and_never_else(name: str, hearings: Mapping[str, Any]) -> None:
    """Features for prototypes and scores, predictions of received and personal models: all of images alone."""
    _, noted = hearings[name]
    assert (True, True) in noted
    assert (False, False) in noted
    assert (True, False) not in noted
    assert (False, True) not in noted


@pytest.mark.parametrize("name", TABLE)
def test_nothing_of_captions_is_on_the_wire(name: str, hearings: Mapping[str, Any]) -> None:
    """Neither P_t, at its start or trained, nor a word, nor a vector of one."""
    trial, _ = hearings[name]
    captions = trial.answerer.captions.training["large"]
    secret = [vectors.float()[0] for vectors in captions.texts.vectors] + [captions.texts.vectors[0].float().mean(0)]
    for visit in trial.visits():
        projections = [visit.before["pool.text.weight"], visit.after["pool.text.weight"]]
        assert not torch.equal(*projections), "it trains, at its client"
        for message in (visit.down, visit.up):
            assert not any("text" in entry for entry in message.tensors)
            for tensor in message.tensors.values():
                rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
                for known in (*secret, *projections[0], *projections[1]):
                    if rows.shape[1] == len(known):
                        assert not torch.isclose(rows.float(), known).all(1).any()
        assert b"photograph" not in visit.frame


@pytest.mark.parametrize("name", ["fm2", "fedrep"])
def test_methods_conform_with_captions(name: str) -> None:
    outcome = check_method(METHODS[name](), network(), rounds=2)
    ours = {"fm2": {"not applicable: the method aggregates in its own way"}}
    assert set(outcome.values()) <= {PASSED} | ours.get(name, set())


@pytest.mark.parametrize("name", sorted(name for name, kind in METHODS.items() if kind.needs_text))
def test_methods_on_words_for_classes_take_no_captions(name: str) -> None:
    with pytest.raises(InputError, match=re.escape(f'captions.provider = "template": method.name = "{name}"')):
        experiment(method={"name": name})


# What does not go together.


def experiment(**sections: Any) -> Experiment:
    captions = {"provider": "template", "text_encoder": "tiny"}
    return experiment_from({"data": {"source": "phantoms"}, "captions": captions, **sections}, "file.toml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": {"name": "fedlora"}}, 'method.name = "fedlora" learns from words'),
        ({"model": {"adapter": "attention"}}, r"model.adapter .* captions.fusion = true changes these"),
        ({"model": {"classifier": "text"}}, r'model.classifier = "text" .* \(allowed with them: captions.fusion'),
        ({"training": {"compile": "auto"}}, r'training.compile = "auto" \(allowed with captions: "off"\)'),
        ({"captions": {"provider": "template", "fusion": False, "alpha": 0.0}}, "leave captions nothing to do"),
        ({"captions": {"provider": "template", "fusion": False, "in_mixtures": True}}, "needs captions.fusion = true"),
    ],
)
def test_what_does_not_go_with_captions_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"file.toml: .*{message}"):
        experiment(**sections)


def test_the_loss_alone_goes_with_an_encoders_head() -> None:
    loss_alone = {"provider": "template", "text_encoder": "tiny", "fusion": False}
    assert not experiment(captions=loss_alone, model={"classifier": "text"}).captions.fusion
    experiment(captions={}, model={"classifier": "text"}, training={"compile": "auto"})


def test_without_captions_the_section_is_no_part_of_the_digest() -> None:
    """So that runs of versions without it keep theirs."""
    none, other = experiment(captions={}), experiment(captions={"width": 128})
    assert none.digest() == other.digest()
    narrow = experiment(captions={"provider": "template", "text_encoder": "tiny", "width": 128})
    assert len({none.digest(), experiment().digest(), narrow.digest()}) == 3
    files = [experiment(captions={"provider": "file", "file": f"{place}/captions.jsonl"}) for place in "ab"]
    assert files[0].digest() == files[1].digest(), "where a file is decides no number"


# Names in a file, and test images.


def test_names_of_a_file_are_those_of_the_whole_source(tmp_path: Path) -> None:
    """Images that the experiment leaves out are known all the same; the source is only listed for a strange name."""
    from PIL import Image

    lines = ["image,label,site"]
    for number in range(12):
        Image.new("RGB", (8, 8), (number,) * 3).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'xy'[number % 2]},a")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    options = DataOptions(path=str(tmp_path), image_size=8, max_train_per_client=4)
    federation = read_federation(options, 0)
    names = KnownNames(federation, options)
    used = [name for client in federation.clients for split in (client.train, client.test) for name in split.names]
    assert len(used) < 12
    assert all(name in names for name in used)
    assert "_listed" not in names.__dict__
    assert all(f"{number}.png" in names for number in range(12))
    assert "12.png" not in names
    assert sorted(names) == sorted(f"{number}.png" for number in range(12))
    assert len(names) == 12
    assert next(iter(names)) == used[0]


def test_captions_of_test_images_go_to_the_images_that_they_are_of(tmp_path: Path) -> None:
    """Batch after batch; an image without one is predicted as ever."""
    client = a_client(FedAvg())
    texts = [f"caption {row}" if row % 2 else None for row in range(len(client))]
    book = CaptionBook("large", "test", tuple(None if text is None else Caption(text, "callable") for text in texts))
    embedded = embed(book, WordVectors(), folder=tmp_path)
    predict, rows = told(FedAvg().predict, embedded), torch.arange(len(client))
    client.model.eval()
    with torch.no_grad():
        found = torch.cat([predict(client, client.inputs.batch(part, None)) for part in rows.split(5)])
        alone = torch.cat([client.model(client.inputs.batch(part, None)) for part in rows.split(5)])
        with telling(client.model, embedded.batch(rows)):
            at_once = client.model(client.inputs.batch(rows, None))
    torch.testing.assert_close(found, at_once)
    assert torch.isclose(found, alone).all(1).tolist() == [text is None for text in texts]
