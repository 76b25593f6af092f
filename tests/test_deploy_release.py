"""What leaves a hospital: nothing that sums up few images, nothing that was not agreed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy_fixtures import founded, spoken_of
from experiment_fixtures import tiny
from wardround.answering import Answerer
from wardround.deploy.agreement import Agreement, Parties, read_agreement
from wardround.deploy.departures import departures, departures_text
from wardround.deploy.hospital import Hospital, open_hospital
from wardround.deploy.joining import Joining, SplitCounts, federation_elsewhere, joining, objection
from wardround.errors import InputError
from wardround.experiment import make_answerer, set_up
from wardround.federation.messages import BadMessage, Message, named
from wardround.federation.reports import check_instructions, released

SCORES: dict[str, Any] = {
    "n": 25, "accuracy": 0.6, "balanced_accuracy": 0.5, "macro_f1": 0.5, "auroc": 0.7, "ece": 0.1,
    "support": [20, 5], "confusion": [[15, 5], [5, 0]],
}  # fmt: skip


# ---- metrics


def test_metrics_of_enough_images_go_and_tables_of_few_stay() -> None:
    assert released(SCORES, 0) == SCORES
    assert released(SCORES, 5) == SCORES
    tables = {"support": [0, 0], "confusion": [[0, 0], [0, 0]]}
    assert released(SCORES, 6) == SCORES | tables
    few = released(SCORES, 26)
    assert few == dict.fromkeys(SCORES) | tables | {"n": 25}


def test_an_empty_split_tells_nothing_anyway() -> None:
    empty = SCORES | {"n": 0, "support": [0, 0], "confusion": [[0, 0], [0, 0]], "accuracy": None}
    assert released(empty, 20) == empty


# ---- replies


def answered(min_count: int, **changes: Any) -> Message:
    """What a client with 12 training images, 4 of each class, answers."""
    setup = set_up(tiny(**changes))
    answerer: Answerer = make_answerer(setup, None, None, 1, min_count=min_count)
    scalars = {"round": 1, "phase": "train", "evaluate_personal": True, "evaluate_received": True}
    return answerer.reply("site-01", Message(named("state", answerer.side.initial_state), scalars))


def test_a_summary_of_few_images_stays_with_all_that_needs_it() -> None:
    keys = {"method__name": "pafp", "method__groups": 1, "method__reduce": "channel"}
    assert Message(answered(12, **keys).tensors).under("statistic")
    with pytest.raises(BadMessage, match="withheld: statistics of 12 images; this client gives none of fewer than 13"):
        answered(13, **keys)


def test_prototypes_carry_their_counts_and_those_of_few_images_stay() -> None:
    """Four images of each class; FedProto can do without a class."""
    every = answered(4, method__name="fedproto")
    assert every.scalars["counts"] == {f"prototype/{c}": 4 for c in range(3)}
    assert set(every.under("statistic")) == set(every.scalars["counts"])
    few = answered(5, method__name="fedproto")
    assert not few.under("statistic")
    assert "counts" not in few.scalars


def test_class_moments_of_few_images_stay() -> None:
    from wardround.methods.registry import method_from

    setup = set_up(tiny(method__name="fedavg+ccvr", model__head="shared"))
    answerer = make_answerer(setup, None, None, 1)
    scalars = {"round": 4, "phase": "moments"}
    client = answerer.load("site-01", Message(named("state", answerer.side.initial_state), scalars))
    moments = answerer.method.statistics(client)
    moments = {**moments, "count": torch.tensor([4.0, 3.0, 0.0])}
    kept = method_from(answerer.method.to_toml() | {"name": answerer.method.name}).release(client, moments, 4)
    assert kept["count"].tolist() == [4.0, 0.0, 0.0]
    torch.testing.assert_close(kept["mean"][0], moments["mean"][0])
    assert not kept["mean"][1:].any()
    assert not kept["covariance"][1:].any()


def test_loss_log_and_metrics_of_few_images_stay() -> None:
    said = answered(13).scalars
    assert (said["loss"], said["log"], said["examples"]) == (None, {}, 12)
    assert said["personal"]["test"] == released(answered(0).scalars["personal"]["test"], 13)
    assert said["personal"]["test"]["accuracy"] is None


# ---- requests


@pytest.mark.parametrize(
    ("scalars", "named_in_it"),
    [
        ({"round": 1}, "phase"),
        ({"round": 1, "phase": "train", "labels": True}, "labels"),
        ({"round": "1", "phase": "train"}, "round"),
        ({"round": 1, "phase": "train", "final": 1}, "final"),
    ],
)
def test_a_request_for_anything_else_is_refused(scalars: dict[str, Any], named_in_it: str) -> None:
    with pytest.raises(BadMessage, match=named_in_it):
        check_instructions(Message({}, scalars))


def test_an_unknown_exchange_is_refused() -> None:
    answerer = make_answerer(set_up(tiny()), None, None, 1)
    state = named("state", answerer.side.initial_state)
    frame = answerer.codec.encode(Message(state, {"round": 1, "phase": "images"}))
    with pytest.raises(BadMessage, match=r"phase 'images' is none of this method's \(evaluate, train\)"):
        answerer.answer("site-01", frame)


def test_a_request_larger_than_any_is_refused() -> None:
    answerer = make_answerer(set_up(tiny()), None, None, 1)
    frame = b"WRD\x01\x00" + bytes(2**25)
    with pytest.raises(BadMessage, match="bytes, at most"):
        answerer.answer("site-01", frame)


# ---- joining


def agreement(**parties: Any) -> Agreement:
    known = {"clients": ("site-01", "site-02", "site-03"), "classes": ("a", "b", "c")}
    return Agreement(spoken_of(), Parties(**known | parties))


def word(agreed: Agreement, **changes: Any) -> Joining:
    data = set_up(spoken_of()).federation.clients[0]
    return joining(agreed, data, agreed.parties.min_count, "frozen").model_copy(update=changes)


def test_numbers_by_class_go_where_every_class_has_enough() -> None:
    assert word(agreement()).splits["train"] == SplitCounts(n=60, by_class=[20, 20, 20])
    assert word(agreement(min_count=21)).splits["train"] == SplitCounts(n=60, by_class=None)


def test_who_means_the_same_may_join() -> None:
    agreed = agreement()
    assert objection(word(agreed), agreed, "frozen") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agreement": "other"}, "it means another experiment"),
        ({"frozen": "other"}, "the frozen part of its network differs"),
        ({"min_count": 3}, "its min_count is 3, agreed are 20"),
        ({"splits": {}}, "its numbers of images are not those of 3 splits"),
    ],
)
def test_who_does_not_is_told_why(changes: dict[str, Any], said: str) -> None:
    agreed = agreement()
    assert said in (objection(word(agreed, **changes), agreed, "frozen") or "")


def test_the_server_knows_numbers_and_no_image() -> None:
    agreed = agreement()
    hidden = {split: SplitCounts(n=7, by_class=None) for split in ("train", "val", "test")}
    words = {name: word(agreed) for name in agreed.parties.clients} | {"site-02": word(agreed, splits=hidden)}
    federation = federation_elsewhere(agreed, words)
    assert federation.is_elsewhere
    assert [len(client.train) for client in federation.clients] == [60, 7, 60]
    assert federation.counts().tolist() == [[20, 20, 20], [0, 0, 0], [20, 20, 20]]
    assert "site-02: images per class withheld for train, val, test" in federation.notes[0]
    assert not set_up(spoken_of()).federation.is_elsewhere


# ---- the dry run


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    experiment = spoken_of(method__name="pafp", method__groups=1).changed(
        {"data.phantoms.train_per_client": 18}, "test"
    )
    return open_hospital(founded(tmp_path / "d", experiment)[1])


def test_the_dry_run_lists_every_tensor_of_a_reply(hospital: Hospital) -> None:
    found = departures(hospital)
    schema = hospital.answerer.side.reply_schema("train")
    assert {line["name"] for line in found["tensors"]} == set(schema)
    sent = hospital.answerer.side.initial_state
    by_name = {line["name"]: line for line in found["tensors"]}
    for name, tensor in named("state", sent).items():
        assert by_name[name]["bytes"] == tensor.numel() * tensor.element_size()
        assert by_name[name]["shape"] == list(tensor.shape)
    assert not {name for name in by_name if "before" in name or "head" in name}, "local parts"
    assert "made of 18 images, fewer than 20" in by_name["statistic/0/mean"]["withheld"]
    assert all(found["scalars"].values())
    json.dumps(found)


def test_the_dry_run_can_be_read(hospital: Hospital) -> None:
    text = departures_text(hospital)
    assert "site-01 would send to 127.0.0.1" in text
    assert "STAYS HERE: made of 18 images" in text
    assert "train: 18 images, images per class withheld" in text


def test_another_experiment_has_another_folder(tmp_path: Path, hospital: Hospital) -> None:
    other = open_hospital(founded(tmp_path / "e", spoken_of(seed=9))[1])
    assert other.run.name != hospital.run.name
    assert read_agreement(hospital.folder).digest.startswith(hospital.run.name.removeprefix("run-"))
    with pytest.raises(InputError, match="cannot be read"):
        read_agreement(tmp_path)
