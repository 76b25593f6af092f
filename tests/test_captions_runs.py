"""Whole runs with captions: by the command line, cut short, put to use, at a hospital, and what no test learns of."""

from __future__ import annotations

import json
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn
from typer.testing import CliRunner

from deploy_fixtures import founded, spoken_of
from experiment_fixtures import CLIENTS, KilledWhen, checkpoint_bytes, figures, in_a_process, lines, tiny, tiny_file
from wardround.captions.caption import CaptionLeak, Provider
from wardround.captions.notes import IMAGES_ALONE, NO_CAPTION
from wardround.captions.options import CaptionOptions
from wardround.cli import app
from wardround.config import Experiment
from wardround.data.federation import ClientData, Federation, Samples, SplitName
from wardround.data.read import read_federation
from wardround.deploy.departures import departures
from wardround.deploy.hospital import Hospital, open_hospital, own_captions
from wardround.deploy.serving import prepare
from wardround.errors import InputError
from wardround.evaluation.results import merge_results
from wardround.experiment import run
from wardround.federation.rules import Owner
from wardround.models.caption_fusion import CaptionedPool
from wardround.using import export, load_exported, load_trained

SECTION = {"provider": "template", "text_encoder": "tiny", "width": 16}
TABLE = ("fm2", "fedavg", "fedprox", "fedbn", "fedrep", "fedproto", "per-fedavg")


def captioned(name: str = "fedavg", rounds: int = 2, **changes: Any) -> Experiment:
    """The tiny experiment with captions; `captions__coverage=0.5` changes a key."""
    keys = {"method__name": name, "rounds": rounds, **{f"captions__{key}": value for key, value in SECTION.items()}}
    return tiny(**keys | changes)


def words(experiment: Experiment) -> Federation:
    return read_federation(experiment.data, experiment.seed)


def written(file: Path, captions: dict[str, str]) -> str:
    file.write_text("".join(f"{json.dumps({'image': name, 'text': text})}\n" for name, text in captions.items()))
    return str(file)


def logits(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every prediction of a run on test images, by client and model."""
    found = {}
    for client in CLIENTS:
        with np.load(folder / "predictions" / f"{client}.npz") as kept:
            found |= {f"{client}/{which}": kept[which] for which in ("personal", "received") if which in kept}
    return found


# Every method of the paper's table, by the command line.


@pytest.mark.parametrize("name", TABLE)
def test_the_paper_s_methods_run_with_captions(name: str, tmp_path: Path) -> None:
    """FM² and the others of its table 3; the results say what was used, and what tests were made of."""
    file, out = tiny_file(tmp_path, **_flat(captioned(name, rounds=1))), tmp_path / "out"
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "note: captions: 36 of 36 training images have one" in done.output
    assert f"note: {IMAGES_ALONE}" in done.output
    assert json.loads((out / "results.json").read_text())["captions"] == {
        "provider": "template",
        "text_encoder": "tiny",
        "fusion": True,
        "at_test": False,
        "captioned": 36,
        "images": 36,
        "coverage": 1.0,
        "with_captions": None,
    }
    logs = [line["log"] for line in lines(out) if line.get("log")]
    assert len(logs) == len(CLIENTS)
    assert all(log["caption_loss"] > 0 for log in logs)
    assert "every validation and test figure is of predictions from images alone" in (out / "report.html").read_text()


def _flat(experiment: Experiment) -> dict[str, Any]:
    """The keys in which an experiment differs from the tiny one."""
    return {
        "method__name": experiment.method["name"],
        "rounds": experiment.rounds,
        **{f"captions__{key}": value for key, value in SECTION.items()},
    }


# What no test learns of.


def relabelled(federation: Federation) -> Federation:
    """The same images, with other labels on those that nothing trains on."""

    def other(part: Samples) -> Samples:
        return replace(part, labels=(part.labels + 1) % len(federation.classes))

    clients = (replace(client, val=other(client.val), test=other(client.test)) for client in federation.clients)
    return replace(federation, clients=tuple(clients))


@pytest.mark.parametrize("provider", ["template", "file"])
@pytest.mark.parametrize("name", ["fm2", "fedproto", "per-fedavg"])
def test_labels_of_test_images_reach_no_prediction(name: str, provider: str, tmp_path: Path) -> None:
    """Captions that state the label, of test images too where a file has them: with other labels on all images that
    nothing trains on, every logit is the same to the bit."""
    experiment, federation = captioned(name, rounds=1), words(captioned())
    for number, data in enumerate((federation, relabelled(federation))):
        if provider == "file":
            texts = {
                image: f"A dermoscopy image of the class {data.classes[label]}, as its reader has written."
                for client in data.clients
                for part in (client.train, client.val, client.test)
                for image, label in zip(part.names, part.labels, strict=True)
            }
            keys = {"captions.provider": "file", "captions.file": written(tmp_path / f"{number}.jsonl", texts)}
            experiment = experiment.changed({**keys, "captions.filter": "off"}, "test")
        run(experiment, tmp_path / f"run-{number}", federation=data)
    ours, theirs = (logits(tmp_path / f"run-{number}") for number in range(2))
    assert len(ours) >= len(CLIENTS)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(values, theirs[which]) for which, values in ours.items())
    assert figures(tmp_path / "run-0")["clients"] != figures(tmp_path / "run-1")["clients"], "labels differ indeed"


def test_labels_of_training_images_reach_training_through_captions(tmp_path: Path) -> None:
    """The test above would see it, if they reached a prediction: in training they do make a difference."""
    for number, paraphrase in enumerate(("melanoma", "naevus")):
        experiment = captioned(captions__phrases={"dermoscopy": f"dermoscopy of {paraphrase}"}, rounds=1)
        run(experiment, tmp_path / f"run-{number}")
    ours, theirs = (logits(tmp_path / f"run-{number}") for number in range(2))
    assert not any(np.array_equal(values, theirs[which]) for which, values in ours.items())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits of which any provider is asked for a caption."""
    found: list[str] = []
    for kind in _below(Provider):
        if "get" in vars(kind):
            monkeypatch.setattr(kind, "get", _noting(kind.get, found))
    return found


def _below(kind: type) -> list[type]:
    return [kind, *(inner for below in kind.__subclasses__() for inner in _below(below))]


def _noting(get: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    def noting(self: Provider, client: ClientData, split: SplitName, row: int) -> Any:
        found.append(split)
        return get(self, client, split, row)

    return noting


def test_a_run_asks_for_captions_of_training_images_alone(asked: list[str], tmp_path: Path) -> None:
    run(captioned("fm2", rounds=1), tmp_path / "run")
    assert asked
    assert set(asked) == {"train"}


def test_a_provider_that_states_labels_cannot_be_used_at_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the check of the options is left out, the provider itself raises."""
    experiment = captioned()
    broken = experiment.model_copy(update={"captions": experiment.captions.model_copy(update={"at_test": True})})
    with pytest.raises(CaptionLeak, match="captions of the test split were asked of provider 'template'"):
        run(broken, tmp_path / "run")


# Captions of test images that were made without the label.


def _look(image: NDArray[np.uint8], prompt: str, *, temperature: float) -> str:
    if "SUPPORTED" in prompt:
        return "SUPPORTED"
    tone = image.mean(axis=(0, 1)).round().astype(int)
    return f"A dermoscopy image whose mean colour is {tone[0]} red, {tone[1]} green and {tone[2]} blue."


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("eyes")
    module.look = _look  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "eyes", module)
    return "eyes:look"


def test_figures_with_captions_stand_apart(eyes: str, asked: list[str], tmp_path: Path) -> None:
    """`at_test` adds figures and changes none."""
    keys = {"captions__provider": "callable", "captions__callable": eyes}
    for at_test in (False, True):
        run(captioned(captions__at_test=at_test, **keys), tmp_path / str(at_test))
    without, beside = (figures(tmp_path / str(at_test)) for at_test in (False, True))
    assert {split for split in asked if split != "train"} == {"test"}
    told = beside["captions"].pop("with_captions")
    assert without["captions"].pop("with_captions") is None
    assert (without["captions"].pop("at_test"), beside["captions"].pop("at_test")) == (False, True)
    more = beside["communication"].pop("bytes_up") - without["communication"].pop("bytes_up")
    assert 0 < more < 3 * 1024, "three tables of metrics"
    assert without == beside
    tensors = [
        {name: data for name, data in checkpoint_bytes(tmp_path / str(at_test)).items() if name.endswith("safetensors")}
        for at_test in (False, True)
    ]
    assert tensors[0]
    assert tensors[0] == tensors[1]
    assert told["clients"].keys() == set(CLIENTS)
    assert all(client["n_test"] == 6 for client in told["clients"].values())
    runs = [figures(tmp_path / "True") | {"seeds": [seed], "seconds": {}} for seed in (1, 2)]
    merged = merge_results(runs)["captions"]
    assert (merged["captioned"], merged["images"], merged["coverage"]) == (36, 36, 1.0)
    assert merged["with_captions"]["clients"]["site-01"]["accuracy"] == told["clients"]["site-01"]["accuracy"] * 2


# The same bits, and a run that goes on.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(captioned("fm2", rounds=3), folder)
    return folder


def test_two_workers_give_the_bits_of_one(whole: Path, tmp_path: Path) -> None:
    run(captioned("fm2", rounds=3), tmp_path / "two", workers=2)
    assert checkpoint_bytes(tmp_path / "two") == checkpoint_bytes(whole)
    assert figures(tmp_path / "two") == figures(whole)


def test_a_killed_run_resumes_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    experiment, folder = captioned("fm2", rounds=3), tmp_path / "run"
    killed = [KilledWhen("combining", 2)]
    assert in_a_process(lambda: run(experiment, folder, observers=killed)) == -signal.SIGKILL
    run(experiment, folder, resume=True)
    assert checkpoint_bytes(folder) == checkpoint_bytes(whole)
    assert figures(folder) == figures(whole)
    assert lines(folder) == lines(whole)


def test_a_run_does_not_go_on_with_other_captions(tmp_path: Path) -> None:
    """A file may have changed where its name has not."""
    names = words(captioned()).client("site-02").train.names
    texts = {name: f"A dermoscopy image that is the number {row} of its site." for row, name in enumerate(names)}
    keys = {"captions__provider": "file", "captions__file": written(tmp_path / "captions.jsonl", texts)}
    run(captioned(rounds=1, **keys), tmp_path / "run")
    run(captioned(rounds=2, **keys), tmp_path / "run", resume=True)
    written(tmp_path / "captions.jsonl", texts | {names[3]: "A dermoscopy image that was described a second time."})
    with pytest.raises(InputError, match="other captions than there are now; clients whose captions differ: site-02"):
        run(captioned(rounds=3, **keys), tmp_path / "run", resume=True)


# Files with something wrong.


def test_a_file_of_unknown_images_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "captions.jsonl", {"nobody.png": "A dermoscopy image of nobody whom the data have."})
    source = tiny_file(tmp_path)
    keys = ["--set", "captions.provider=file", "--set", f"captions.file={file}", "--set", "captions.text_encoder=tiny"]
    done = CliRunner().invoke(app, ["run", str(source), "--out", str(tmp_path / "out"), *keys])
    assert done.exit_code == 2
    assert "1 captions are of images that the data do not have: row 1 (nobody.png)" in done.output
    assert not (tmp_path / "out").exists()


def test_without_any_caption_training_is_on_images_alone_and_says_so(tmp_path: Path) -> None:
    file = written(tmp_path / "captions.jsonl", {})
    run(captioned(rounds=1, captions__provider="file", captions__file=file), tmp_path / "run")
    assert NO_CAPTION in json.loads((tmp_path / "run" / "federation.json").read_text())["notes"]
    found = figures(tmp_path / "run")["captions"]
    assert (found["captioned"], found["coverage"]) == (0, 0.0)
    assert not any("caption_loss" in line["log"] for line in lines(tmp_path / "run") if line.get("log"))


def test_captions_that_repeat_are_explained(tmp_path: Path) -> None:
    """Every image of a client says the same: with one text in batches of 8 and 4, or of 12, the floor is log n."""
    names = [name for client in words(captioned()).clients for name in client.train.names]
    file = written(tmp_path / "captions.jsonl", dict.fromkeys(names, "A dermoscopy image like any other of its kind."))
    run(captioned(rounds=1, captions__provider="file", captions__file=file), tmp_path / "run")
    notes = json.loads((tmp_path / "run" / "federation.json").read_text())["notes"]
    floor = next(note for note in notes if "cannot fall below" in note)
    assert f"site-01 {np.log(8):.2f}, site-02 {np.log(8):.2f}" in floor
    logged = [line["log"]["caption_loss"] for line in lines(tmp_path / "run") if line.get("log")]
    assert logged == pytest.approx([(np.log(8) + np.log(4)) / 2] * 3, rel=1e-4)


# A run put to use.


def test_a_trained_model_predicts_from_images_alone_without_the_text_encoder(whole: Path, tmp_path: Path) -> None:
    """It has no P_t, so that it could not take a caption, and needs nothing of the encoder."""
    trained = load_trained(whole, "site-01")
    pool = trained.model.pool
    assert isinstance(pool, CaptionedPool)
    assert isinstance(pool.text, nn.Identity)
    data = words(trained.experiment).client("site-01").test
    found = trained.logits(data.images)
    np.testing.assert_allclose(found, logits(whole)["site-01/personal"], atol=1e-4)  # the run's cache is float16
    export(trained, tmp_path / "model.safetensors")
    assert np.array_equal(load_exported(tmp_path / "model.safetensors").logits(data.images), found)


# At a hospital.


def joined(tmp_path: Path, own: str, **keys: Any) -> Hospital:
    """The first client of a deployment with captions, whose `client.toml` says `own` in [captions]."""
    experiment = spoken_of(**{f"captions__{key}": value for key, value in (SECTION | keys).items()})
    folder = founded(tmp_path / "deployed", experiment)[1]
    file = folder / "client.toml"
    text = file.read_text().partition("[captions]")[0]
    file.write_text(f"{text}[captions]\n{own}\n")
    return open_hospital(folder)


def test_a_hospital_has_captions_of_its_own_and_none_leave(tmp_path: Path) -> None:
    """Templates are agreed on; this one has a file, and another encoder's vectors would do as well."""
    names = words(spoken_of()).client("site-01").train.names
    (tmp_path / "deployed").mkdir()
    sentences = {
        name: f"A dermoscopy image, the number {row} of this hospital's own." for row, name in enumerate(names)
    }
    file = written(tmp_path / "mine.jsonl", dict(list(sentences.items())[:30]))
    (tmp_path / "deployed").rmdir()
    hospital = joined(tmp_path, f'provider = "file"\nfile = "{file}"')
    assert "captions: 30 of 60 training images have one (site-01 30 of 60); 30 different texts" in hospital.notes
    leaving = departures(hospital)
    assert "pool.text.weight" in leaving["stays"]
    assert {"state/pool.image.weight", "state/pool.fusion.null"} <= {line["name"] for line in leaving["tensors"]}
    assert not any("text" in line["name"] for line in leaving["tensors"])
    assert hospital.run.exists()
    told = json.loads((hospital.run / "federation.json").read_text())["captions"]
    assert told["clients"]["site-01"]["captioned"] == 30


def test_a_deployments_server_knows_nothing_of_captions(tmp_path: Path) -> None:
    """Its network has the shared entries of a client's, and no P_t, so that it needs no text encoder."""
    server, client, *_ = founded(tmp_path / "d", spoken_of(**{f"captions__{key}": v for key, v in SECTION.items()}))
    post, hospital = prepare(server, insecure=True), open_hospital(client)
    assert post.side.initial_state.keys() == hospital.answerer.side.initial_state.keys()
    assert not any(name.startswith("pool.text") for name in post.side.rules.owners)
    assert "pool.text.weight" in hospital.answerer.side.rules.names(Owner.LOCAL)
    assert post.agreement.digest == hospital.agreement.digest


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("width = 32", "captions.width is the same for all"),
        ("alpha = 1.0", "captions.alpha is the same for all"),
        ('provider = "none"', "coverage = 0 does without captions"),
        ('provider = "callable"', "captions.callable is missing: name your own function"),
        ('fiel = "a.jsonl"', "captions.fiel: there is no such key"),
    ],
)
def test_a_hospital_may_not_change_the_network_nor_do_without_a_name(tmp_path: Path, own: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        joined(tmp_path, own)


def test_a_function_is_called_only_where_the_hospital_names_it(tmp_path: Path, eyes: str) -> None:
    """What others have agreed on is not run here."""
    with pytest.raises(InputError, match=r"captions\.callable is missing"):
        joined(tmp_path / "a", "", provider="callable", callable="os:getcwd")
    agreed = (tmp_path / "a" / "deployed" / "client-site-01" / "experiment.toml").read_text()
    assert "os:getcwd" not in agreed
    hospital = joined(tmp_path / "b", f'callable = "{eyes}"', provider="callable", callable="os:getcwd")
    assert any(note.startswith("captions: 60 of 60") for note in hospital.notes)


def test_a_file_is_beside_the_clients_settings_unless_they_say_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    agreed = CaptionOptions(provider="file", file="/elsewhere/captions.jsonl", states_label=False)
    found = own_captions(folder, agreed, {})
    assert found == {"captions.file": str((folder / "captions.jsonl").resolve()), "captions.callable": "none"}
    with_template = own_captions(folder, agreed, {"provider": "template", "coverage": 0.5})
    assert with_template["captions.file"] == "none"
    assert with_template["captions.states_label"]
    assert own_captions(folder, CaptionOptions(), {}) == {}
    with pytest.raises(InputError, match=r"experiment\.toml has no captions"):
        own_captions(folder, CaptionOptions(), {"coverage": 0.5})
    experiment = tiny(captions__provider="file", captions__file="/elsewhere/captions.jsonl")
    made = founded(tmp_path / "d", experiment)[1]
    assert "elsewhere" not in (made / "experiment.toml").read_text()
    assert 'file = "captions.jsonl"' in (made / "client.toml").read_text()
