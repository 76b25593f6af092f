"""Experiment files: what they may say, what is said when they are wrong, and that nothing is lost in writing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_fixtures import TINY, tiny
from wardround.config import Experiment, differences, experiment_from, experiment_keys, load_experiment, parse_override
from wardround.errors import InputError
from wardround.methods.registry import METHODS, PRESETS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(TINY))
    return path


def complaint(file: Path, *overrides: str) -> str:
    """The error message, without the file's name."""
    with pytest.raises(InputError) as caught:
        load_experiment(file, overrides)
    return str(caught.value).removeprefix(f"{file}: ")


# ---- unknown keys


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("trainin.lr=1", "trainin", "training"),
        ("training.lr_=1", "training.lr_", "lr"),
        ("data.phantoms.famly=blood", "data.phantoms.famly", "family"),
        ("data.partition.alfa=1", "data.partition.alfa", "alpha"),
        ("federation.particpation=1", "federation.particpation", "participation"),
        ("transport.worker=2", "transport.worker", "workers"),
        ("seeds=1", "seeds", "seed"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_one(file: Path, override: str, key: str, nearest: str) -> None:
    assert complaint(file, override) == f"{key}: there is no such key (did you mean {nearest!r}?)"


def test_an_unknown_key_of_a_method_suggests_the_nearest_one(file: Path) -> None:
    said = complaint(file, "method.name=pafp", "method.lamda=1")
    assert said == "method.lamda: there is no such key (did you mean 'lambda'?)"


def test_a_key_in_the_wrong_section_is_shown_the_right_one(file: Path) -> None:
    assert complaint(file, "lr=0.1") == "lr: there is no such key (did you mean 'training.lr'?)"
    assert complaint(file, "model.workers=2").endswith("(did you mean 'transport.workers'?)")
    assert complaint(file, "data.clients=2").endswith(
        "(did you mean 'data.partition.clients' or 'data.phantoms.clients'?)"
    )


def test_an_unknown_key_like_no_other_lists_what_is_allowed(file: Path) -> None:
    assert complaint(file, "transport.zzz=1").endswith("(allowed: codec, name, state_ram_mib, workers)")
    assert complaint(file, "method.zzz=1") == "method.zzz: there is no such key (allowed: name, weights)"


def test_every_wrong_key_is_named_at_once(file: Path) -> None:
    assert complaint(file, "training.lr_=1", "rounds=-1").splitlines() == [
        "rounds: expected a number from 0 up, found -1",
        "training.lr_: there is no such key (did you mean 'lr'?)",
    ]


# ---- wrong values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=2.5", "rounds: expected a whole number, found 2.5"),
        ("rounds=many", "rounds: expected a whole number, found 'many'"),
        ("training.batch_size=true", "training.batch_size: expected a whole number, found true"),
        ("training.batch_size=0", "training.batch_size: expected a number from 1 up, found 0"),
        ("training.lr=0", "training.lr: expected a number above 0, found 0"),
        ("training.lr='0.1'", "training.lr: expected a number, found '0.1'"),
        ("training.lr=inf", "training.lr: expected a finite number, found inf"),
        ("training.lr=nan", "training.lr: expected a finite number, found nan"),
        ("training.momentum=1", "training.momentum: expected a number below 1, found 1"),
        ("training.cache=maybe", "training.cache: expected true or false, found 'maybe'"),
        ("training.optimizer=sdg", "training.optimizer: expected 'sgd', 'adam' or 'adamw', found 'sdg'"),
        ("federation.quorum=2", "federation.quorum: expected a number up to 1, found 2"),
        ("model.finetune_blocks=-1", "model.finetune_blocks: expected a number from 0 up, or 'all', found -1"),
        ("model.finetune_blocks=al", "model.finetune_blocks: expected a whole number, or 'all', found 'al'"),
        ("model.pretrained=3", "model.pretrained: expected true or false, or a text in quotes, found 3"),
        ("data.sites=a", """data.sites: expected a list such as ["a", "b"], found 'a'"""),
        ("data.sites=[1]", "data.sites.0: expected a text in quotes, found 1"),
        ("data.phantoms=3", "data.phantoms: expected a section [data.phantoms], found 3"),
        ("data.path.x=3", "data.path: expected a text in quotes, found a section"),
        ("method=pafp", "method: expected a section [method], found 'pafp'"),
        ("data.source=table", 'data: source = "table" needs data.path'),
        ("transport.codec=float17", "transport.codec: no codec is called 'float17' (did you mean 'float16'?)"),
        ("method.name=fedagv", "method.name: there is no method 'fedagv' (did you mean 'fedavg'?)"),
        ("method.name=[1]", "method.name: there is no method [1] (allowed: " + ", ".join(sorted(METHODS)) + ")"),
    ],
)
def test_a_wrong_value_says_what_is_allowed_and_what_was_found(file: Path, override: str, message: str) -> None:
    assert complaint(file, override) == message


def test_a_section_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("rounds = 3\n")
    assert complaint(tmp_path / "empty.toml") == "data: is missing"


def test_a_preset_as_a_method_is_spelled_out(file: Path) -> None:
    assert complaint(file, "method.name=ft-2B") == (
        "method.name: there is no method 'ft-2B', but `compare` takes 'ft-2b' for "
        'method.name = "fedavg", model.finetune_blocks = 2'
    )


def test_files_that_are_no_experiments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.toml: cannot be read \(No such file or directory\)"):
        load_experiment(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment(tmp_path)
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"broken\.toml: not TOML: .*line 1"):
        load_experiment(tmp_path / "broken.toml")
    (tmp_path / "image.toml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(InputError, match=r"image\.toml: cannot be read"):
        load_experiment(tmp_path / "image.toml")


# ---- --set


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr=1e-3", ("training.lr", 0.001)),
        (" rounds = 3 ", ("rounds", 3)),
        ("data.path=a b/c=d", ("data.path", "a b/c=d")),
        ("data.path='12'", ("data.path", "12")),
        ('data.sites=["a", "b"]', ("data.sites", ["a", "b"])),
        ("training.cache=false", ("training.cache", False)),
        ("training.cache=False", ("training.cache", False)),
        ("data.flag=None", ("data.flag", "none")),
        ("data.flag=", ("data.flag", "")),
    ],
)
def test_an_override_is_toml_or_else_text(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["rounds", "=3", ""])
def test_an_override_without_key_or_value_is_an_error(file: Path, text: str) -> None:
    assert complaint(file, text) == f"--set {text}: expected KEY=VALUE, such as training.lr=0.1"


def test_an_override_below_a_value_is_an_error(file: Path) -> None:
    assert complaint(file, "seed.x=3") == "--set seed.x: seed is a value, not a section"


def test_another_method_drops_the_keys_of_the_first_whatever_the_order(file: Path) -> None:
    overrides = ["method.every=3", "method.name=pafp-alt"]
    for order in (overrides, overrides[::-1]):
        assert load_experiment(file, order).method == {"name": "pafp-alt", "every": 3}
    with_keys = load_experiment(file, overrides)
    with_keys.write(file)
    assert load_experiment(file, ["method.name=fedavg"]).method == {"name": "fedavg"}


def test_the_last_of_two_overrides_counts(file: Path) -> None:
    assert load_experiment(file, ["rounds=1", "rounds=2"]).rounds == 2


def test_none_unsets_a_key(file: Path) -> None:
    assert load_experiment(file, ["training.clip_norm=none"]).training.clip_norm is None
    assert load_experiment(file, ["method.name=pafp", "method.lr_local=none"]).bound_method() == METHODS["pafp"]()
    assert complaint(file, "rounds=none") == "rounds: expected a whole number, found 'none'"


# ---- paths


def test_paths_start_from_the_file_and_typed_ones_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home / "images", here / "images", here / "only-here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    file = home / "e.toml"
    file.write_text('[data]\nsource = "folders"\npath = "images"\n[variants.other.data]\npath = "images"\n')
    loaded = load_experiment(file)
    assert loaded.data.path == str(home / "images")
    assert loaded.variants["other"]["data"]["path"] == str(home / "images")
    assert load_experiment(file, ["data.path=images"]).data.path == str(here / "images")
    assert load_experiment(file, ["data.path=../home/images"]).data.path == str(home / "images")
    file.write_text('[data]\nsource = "folders"\npath = "only-here"\n')
    assert load_experiment(file).data.path == str(here / "only-here")
    file.write_text('[data]\nsource = "folders"\npath = "nowhere"\n')
    assert load_experiment(file).data.path == str(home / "nowhere"), "the message should name the likelier place"


def test_a_weights_file_is_found_beside_the_experiment(file: Path) -> None:
    (file.parent / "w.safetensors").write_bytes(b"")
    assert load_experiment(file, ["model.pretrained=w.safetensors"]).model.pretrained == str(
        file.parent / "w.safetensors"
    )
    assert load_experiment(file, ["model.pretrained=true"]).model.pretrained is True


# ---- methods and variants


def test_the_sections_for_compare_are_checked_even_if_unused(file: Path) -> None:
    assert complaint(file, "methods.pafpp.m_loc=1") == ("methods.pafpp: there is no such method (did you mean 'pafp'?)")
    assert complaint(file, "methods.pafp.mloc=1") == (
        "[methods.pafp]: method.mloc: there is no such key (did you mean 'm_loc'?)"
    )
    assert complaint(file, "variants.big.training.lrr=1") == (
        "[variants.big]: training.lrr: there is no such key (did you mean 'lr'?)"
    )
    assert complaint(file, "variants.big=3") == "variants.big: expected a section [variants.big], found 3"


def test_a_change_of_method_takes_that_methods_section() -> None:
    base = experiment_from(TINY | {"methods": {"pafp": {"m_loc": 0.5, "groups": 8}}}, "here")
    changed = base.changed({"method.name": "pafp", "method.groups": 4}, "there")
    assert changed.method == {"name": "pafp", "m_loc": 0.5, "groups": 4}
    assert changed.methods == {}
    assert base.changed({}, "there").method == {"name": "fedavg"}


def test_the_presets_are_experiments() -> None:
    for name, changes in PRESETS.items():
        assert tiny().changed(changes, name).method["name"] == changes["method.name"]


# ---- writing and comparing

OPTIONAL_TEXT = st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(-(2**40), 2**40),
        "rounds": st.integers(0, 10**6),
        "training.lr": st.floats(1e-12, 1e12),
        "training.clip_norm": st.none() | st.floats(1e-9, 1e9),
        "training.augment_views": st.integers(0, 9),
        "model.finetune_blocks": st.just("all") | st.integers(0, 40),
        "model.pretrained": st.booleans(),
        "model.dropout": st.none() | st.floats(0, 1, exclude_max=True),
        "data.sites": st.none() | st.lists(st.text(max_size=5), min_size=1, max_size=3),
        "data.val_fraction": st.none() | st.floats(0, 0.7),
        "data.flag": OPTIONAL_TEXT.filter(lambda text: text not in ("none",)),
        "data.phantoms.feature_skew": st.floats(0, 1),
        "federation.deadline": st.none() | st.floats(1e-3, 1e6),
        "transport.workers": st.none() | st.integers(1, 99),
        "transport.codec": st.sampled_from(["float32", "float16", "float16+zlib", "float16+shuffle+zlib"]),
    },
)


@settings(max_examples=40, deadline=None)
@given(CHANGES, st.sampled_from([{"name": "fedavg"}, {"name": "pafp", "lambda": 3}, {"name": "pafp-alt", "every": 4}]))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], method: dict[str, Any]
) -> None:
    unset = {key: "none" if value is None else value for key, value in changes.items()}
    experiment = experiment_from(TINY | {"method": method}, "here").changed(unset, "there")
    file = tmp_path_factory.mktemp("written") / "config.toml"
    experiment.write(file)
    again = load_experiment(file)
    assert again == experiment.complete()
    assert again.digest() == experiment.digest()
    assert differences(again, experiment) == []


def test_every_key_is_written(file: Path) -> None:
    load_experiment(file, ["method.name=pafp"]).write(file)
    written = tomllib.loads(file.read_text())
    for section, kind in (("training", Experiment.model_fields["training"].annotation), ("method", METHODS["pafp"])):
        keys = {field.alias or name for name, field in kind.model_fields.items()}  # type: ignore[union-attr]
        assert keys <= written[section].keys()


def test_the_digest_is_of_what_decides_the_numbers() -> None:
    base = tiny()
    same = {
        "rounds": 9,
        "transport__workers": 7,
        "training__cache_ram_mib": 1,
        "federation__checkpoint_every": 2,
        "federation__deadline": 5.0,
        "data__path": "elsewhere",
    }
    for key, value in same.items():
        changed = tiny(**{key: value})
        assert changed.digest() == base.digest(), key
        assert differences(changed, base) == [], key
    others = {"seed": 4, "training__lr": 0.02, "training__threads": 2, "transport__codec": "float16"}
    for key, value in others.items():
        changed = tiny(**{key: value})
        assert changed.digest() != base.digest(), key
        assert [line.split(":")[0] for line in differences(changed, base)] == [key.replace("__", ".")]


def test_auto_fits_whatever_was_chosen_but_a_choice_does_not() -> None:
    chosen, undecided = tiny(), tiny(training__memory_format="auto")
    assert differences(undecided, chosen) == []
    assert differences(tiny(training__memory_format="channels_last"), chosen) == [
        "training.memory_format: 'contiguous' -> 'channels_last'"
    ]


# ---- the list of keys


def test_the_list_of_keys_is_complete_and_says_what_is_allowed() -> None:
    listed = {one["key"]: one for one in experiment_keys()}
    tree = tiny().to_toml()
    for key in ("data.phantoms.family", "training.lr", "transport.codec", "federation.quorum", "seed"):
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        assert key in listed
    assert listed["training.lr"]["allowed"] == "number > 0"
    assert listed["federation.quorum"]["allowed"] == "number > 0, <= 1"
    assert listed["training.clip_norm"]["allowed"] == "number > 0 | none"
    assert listed["model.finetune_blocks"]["allowed"] == "whole number >= 0 | all"
    assert listed["model.pretrained"]["allowed"] == "true | false | text"
    assert listed["training.optimizer"]["allowed"] == "sgd | adam | adamw"
    assert listed["data.sites"] == {
        "key": "data.sites",
        "default": None,
        "allowed": "list | none",
        "meaning": "keep only these sites",
    }
    assert all(one["meaning"] for one in listed.values())
    assert [one["key"] for one in experiment_keys("transport")] == [
        "transport.name",
        "transport.workers",
        "transport.codec",
        "transport.state_ram_mib",
    ]
    with pytest.raises(InputError, match=r"there is no section 'trainin' \(did you mean 'training'\?\)"):
        experiment_keys("trainin")
