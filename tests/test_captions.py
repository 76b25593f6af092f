"""Captions: who gives them and to whom, which are used, their vectors, and their loss, against plain NumPy."""

from __future__ import annotations

import itertools
import json
import math
import sys
import types
import urllib.error
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from wardround.captions import asked, text_encoders
from wardround.captions.asked import AskedCaptions, function_named
from wardround.captions.book import CaptionBook, write_book
from wardround.captions.caption import Caption, CaptionLeak, ImageConditioned, Labelled, LabelStating, Provider, Shown
from wardround.captions.contrast import caption_loss, loss_floor
from wardround.captions.coverage import place
from wardround.captions.embedding import embed
from wardround.captions.file import SeenCaptions, StatedCaptions, read_captions
from wardround.captions.filtering import CONTRADICTS, EMPTY, REFUSES, REPEATS, UNNAMED, Filter
from wardround.captions.notes import BOTH, IMAGES_ALONE, NO_CAPTION, expected_floor, notes
from wardround.captions.options import PUBMEDBERT, CaptionOptions
from wardround.captions.providers import provider_for
from wardround.captions.template import PARAPHRASES, TemplateCaptions
from wardround.captions.text_encoders import TextEncoder, text_encoder_for
from wardround.captions.vocabulary import Vocabulary
from wardround.data.federation import WITHHELD, ClientData, samples
from wardround.errors import InputError, MissingExtra, RunError
from wardround.models.encoders import bridge_text

CLASSES = ("melanoma", "melanocytic nevi", "retinamnist:0", "retinamnist:3", "brain: no_finding")
VOCABULARY = Vocabulary(CLASSES, ("dermoscopy", "fundus", "image"))
IMAGES = 12  # of each split


def client(name: str = "a", images: int = IMAGES) -> ClientData:
    """Dermoscopies of melanoma and naevus in turn; names as a table has them."""

    def part(split: str, number: int) -> Any:
        pixels = np.random.default_rng(number).integers(0, 256, (images, 4, 4, 3), dtype=np.uint8)
        names = [f"{name}/{split}/{row:02d}.png" for row in range(images)]
        return samples(pixels, [row % 2 for row in range(images)], names)

    return ClientData(name, part("train", 0), part("val", 1), part("test", 2))


def template(seed: int = 0) -> TemplateCaptions:
    return TemplateCaptions(VOCABULARY, seed)


def written(file: Path, rows: list[Any]) -> Path:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def names_of(data: ClientData) -> list[str]:
    return [name for split in (data.train, data.val, data.test) for name in split.names]


# What captions may say to whom.


class Recording:
    """In the place of a language model: keeps what it was asked."""

    def __init__(self, checks: str = "Supported.") -> None:
        self.asked: list[tuple[NDArray[np.uint8], str, float]] = []
        self.checks = checks

    def __call__(self, image: NDArray[np.uint8], prompt: str, *, temperature: float) -> str:
        self.asked.append((image, prompt, temperature))
        if "Answer with the word SUPPORTED" in prompt:
            return self.checks
        if "Write one sentence" in prompt:
            return f"A dermoscopy image with a mean of {image.mean():.2f},\n consistent with melanoma."
        return f"answer {len(self.asked)}"


def providers(folder: Path, at_test: bool = False) -> dict[type[Provider], Provider]:
    """One of every kind."""
    captions = {
        name: Caption(f"A dermoscopy image called {name}, consistent with melanoma.", "file")
        for name in names_of(client())
    }
    found: list[Provider] = [
        template(),
        StatedCaptions(VOCABULARY, captions),
        SeenCaptions(VOCABULARY, captions, at_test),
        AskedCaptions(VOCABULARY, Recording(), "tests:recording", (8, 60), at_test, folder),
    ]
    return {type(provider): provider for provider in found}


def leaves(kind: type) -> Iterator[type]:
    """The classes below `kind` that none is derived from, as far as the package has them."""
    for below in kind.__subclasses__():
        if below.__module__.startswith("wardround."):
            yield from leaves(below) if below.__subclasses__() else [below]


def test_every_provider_of_the_package_is_tried_here(tmp_path: Path) -> None:
    assert set(leaves(Provider)) == set(providers(tmp_path))


def test_label_stating_captions_never_reach_a_test_path(tmp_path: Path) -> None:
    data = client()
    for provider in providers(tmp_path).values():
        assert provider.get(data, "train", 0) is not None
        for split in ("val", "test"):
            assert not provider.answers(split)
            with pytest.raises(CaptionLeak, match=rf"captions of the {split} split .*{provider.source}"):
                provider.get(data, split, 0)
            with pytest.raises(CaptionLeak):
                write_book(provider, data, split, CaptionOptions(), seed=0)


def test_at_test_lets_image_conditioned_captions_through_and_no_others(tmp_path: Path) -> None:
    every = providers(tmp_path, at_test=True)
    reaching = {kind for kind, provider in every.items() if provider.answers("test")}
    assert reaching == {SeenCaptions, AskedCaptions}
    for kind in reaching:
        assert issubclass(kind, ImageConditioned)
        assert every[kind].get(client(), "test", 0) is not None
    for kind in every.keys() - reaching:
        assert issubclass(kind, LabelStating)
        with pytest.raises(TypeError):
            kind(VOCABULARY, {}, at_test=True)  # type: ignore[call-arg]


def test_what_reaches_a_test_path_does_not_depend_on_labels(tmp_path: Path) -> None:
    """The same images with other labels, or with none that could be read, have the same captions, filtered alike."""
    data, options = client(), CaptionOptions(provider="callable", callable="a:b", at_test=True)
    other = samples(data.test.images, [1 - label for label in data.test.labels], data.test.names)
    hidden = samples(data.test.images, [WITHHELD] * IMAGES, data.test.names)
    for kind, provider in providers(tmp_path, at_test=True).items():
        if provider.answers("test"):
            books = [
                write_book(provider, ClientData("a", data.train, data.val, test), "test", options, seed=0)
                for test in (data.test, other, hidden)
            ]
            assert books[0].captioned == IMAGES, kind
            assert books[0].captions == books[1].captions == books[2].captions


def test_what_an_image_conditioned_provider_sees_holds_no_label() -> None:
    assert {one.name for one in fields(Shown)} == {"name", "modality", "pixels"}
    assert {one.name for one in fields(Labelled)} - {one.name for one in fields(Shown)} == {"label"}

    class Curious(ImageConditioned):
        source = "curious"

        def describe(self, image: Shown) -> Caption:
            assert type(image) is Shown
            return Caption(image.name, self.source)

    assert Curious(VOCABULARY).get(client(), "train", 3) == Caption("a/train/03.png", "curious")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"provider": "template", "at_test": True}, "told the answer"),
        ({"provider": "file", "file": "x", "at_test": True}, "told the answer"),
        ({"at_test": True}, "told the answer"),
        ({"provider": "callable", "callable": "a:b", "at_test": True, "fusion": False}, "fusion = true"),
        ({"provider": "file"}, 'captions.file goes with captions.provider = "file"'),
        ({"provider": "template", "callable": "a:b"}, "captions.callable goes with"),
        ({"states_label": False}, "states_label is for"),
        ({"width": 255}, "not divided"),
        ({"min_words": 61}, "above captions.max_words"),
    ],
)
def test_options_that_make_no_sense_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CaptionOptions(**keys)


def test_what_is_auto() -> None:
    by_template = CaptionOptions(provider="template")
    by_file = CaptionOptions(provider="file", file="x", states_label=False, at_test=True)
    assert (by_template.positives_by_meaning, by_template.filters) == (True, False)
    assert (by_file.positives_by_meaning, by_file.filters) == (False, True)
    assert CaptionOptions(provider="template", multi_positive=False, filter="on").positives_by_meaning is False
    assert (CaptionOptions().alpha, CaptionOptions().temperature, CaptionOptions().dropout) == (0.5, 0.07, 0.3)
    assert CaptionOptions().text_encoder == PUBMEDBERT


# Words, and captions by template.


def test_classes_and_modalities_in_words() -> None:
    words = Vocabulary(CLASSES, VOCABULARY.modalities, {"melanoma": "malignant melanoma"}, {"fundus": "retinal photo"})
    assert [words.finding(0, 0), words.finding(1, 0)] == ["malignant melanoma", "melanocytic nevi"]
    assert words.finding(2, 1) == "no diabetic retinopathy"
    assert words.finding(3, 1) == "severe non-proliferative diabetic retinopathy"
    assert words.finding(3, 0) == "class 3"
    assert words.finding(4, 2) == "no finding"
    assert [words.phrase(kind) for kind in range(3)] == ["dermoscopy image", "retinal photo", "medical image"]
    with pytest.raises(InputError, match=r"no modality 'fundas' \(did you mean 'fundus'\?\)"):
        Vocabulary(CLASSES, ("fundus",), phrases={"fundas": "x"})


def test_templates_say_modality_and_class_and_pass_the_filter() -> None:
    data = client(images=60)
    book = write_book(template(), data, "train", CaptionOptions(provider="template", filter="on"), seed=0)
    assert book.captioned == 60
    assert not book.rejected
    assert len(book.texts) == 2 * len(PARAPHRASES)
    for row, caption in enumerate(book.captions):
        assert caption is not None
        assert "dermoscopy image" in caption.text
        assert CLASSES[row % 2] in caption.text
        assert caption.meaning == f"dermoscopy image: {CLASSES[row % 2]}"
    again = write_book(template(), data, "train", CaptionOptions(), seed=0)
    assert again.captions == book.captions
    assert write_book(template(1), data, "train", CaptionOptions(), seed=0).captions != book.captions


def test_the_hash_is_of_the_text_alone() -> None:
    one, other = Caption("a text", "file"), Caption("a text", "callable", "model", "statement")
    assert one.hash == other.hash != Caption("a Text", "file").hash
    assert (one.meaning, other.meaning) == ("a text", "statement")


def test_an_image_whose_label_is_withheld_has_no_template() -> None:
    data = client()
    hidden = samples(data.train.images, [WITHHELD] * IMAGES, data.train.names)
    assert template().get(ClientData("a", hidden, data.val, data.test), "train", 0) is None


# Captions in a file.


def test_a_file_gives_captions_by_the_images_names(tmp_path: Path) -> None:
    data = client()
    rows = [
        {"image": "a/train/00.png", "text": "An expert\n sees a  lesion.", "source": "expert", "model": "Dr. A"},
        "",
        {"image": "a/test/01.png", "text": "Another."},
    ]
    found = read_captions(written(tmp_path / "c.jsonl", rows), names_of(data))
    provider = StatedCaptions(VOCABULARY, found)
    assert provider.get(data, "train", 0) == Caption("An expert sees a lesion.", "expert", "Dr. A")
    assert provider.get(data, "train", 1) is None
    assert SeenCaptions(VOCABULARY, found, at_test=True).get(data, "test", 1) == Caption("Another.", "file")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [
                {"image": "a/train/00.png", "text": "x"},
                {"image": "b.png", "text": "x"},
                {"image": "c.png", "text": "x"},
            ],
            r"c.jsonl: 2 captions are of images that the data do not have: row 2 \(b.png\), row 3 \(c.png\); names are "
            "those of the source, such as a/train/00.png",
        ),
        (
            [{"image": "a/train/00.png", "text": "x"}, "", {"image": "a/train/00.png", "text": "y"}],
            "1 captions are of an image that has one already: rows 1 and 3",
        ),
        (["{", "[1]"], r"2 rows are no captions, .*row 1 \(not JSON: .*row 2 \(a list\)"),
        ([{"image": "a/train/00.png", "text": "  "}], r"row 1 \(no text\)"),
        ([{"text": "x"}], r"row 1 \(no image\)"),
        ([{"image": "a/train/00.png", "text": "x", "label": 1}], "unknown key 'label', allowed image, text, source"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_captions(written(tmp_path / "c.jsonl", rows), names_of(client()))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"captions.file: .*absent.jsonl is not a readable text file"):
        read_captions(tmp_path / "absent.jsonl", ["a"])


def test_providers_by_name(tmp_path: Path) -> None:
    file = str(written(tmp_path / "c.jsonl", [{"image": "a/train/00.png", "text": "x"}]))
    known = names_of(client())

    def kind(**keys: Any) -> Provider | None:
        return provider_for(CaptionOptions(**keys), VOCABULARY, known, 0, tmp_path)

    assert kind() is None
    assert isinstance(kind(provider="template"), TemplateCaptions)
    assert isinstance(kind(provider="file", file=file), StatedCaptions)
    seen = kind(provider="file", file=file, states_label=False, at_test=True)
    assert isinstance(seen, SeenCaptions)
    assert seen.answers("val")
    asked_for = kind(provider="callable", callable="math:sqrt")
    assert isinstance(asked_for, AskedCaptions)
    assert (asked_for.model, asked_for.words, asked_for.answers("test")) == ("math:sqrt", (8, 60), False)


# Captions that a function writes.


def test_a_function_observes_hypothesises_checks_and_writes_at_temperature_0(tmp_path: Path) -> None:
    data, ask = client(), Recording()
    caption = AskedCaptions(VOCABULARY, ask, "m:f", (8, 60), folder=tmp_path).get(data, "train", 4)
    assert caption is not None
    mean = data.train.images[4].mean()
    assert caption.text == f"A dermoscopy image with a mean of {mean:.2f}, consistent with melanoma."
    assert (caption.source, caption.model) == ("callable", "m:f")
    images, prompts, temperatures = zip(*ask.asked, strict=True)
    assert temperatures == (0, 0, 0, 0)
    assert all(np.array_equal(image, data.train.images[4]) for image in images)
    assert [prompt.startswith("This is a dermoscopy image.") for prompt in prompts] == [True] * 4
    assert "answer 1" in prompts[1]  # the observations
    assert "answer 1" in prompts[2]
    assert "answer 2" in prompts[2]  # the reading
    assert "answer 2" in prompts[3]
    assert "8 to 60 words" in prompts[3]
    assert not any(word in prompt for prompt in prompts for word in ("melanoma", "nevi"))


def test_a_criticised_reading_is_made_anew_and_what_doubt_is_left_is_told(tmp_path: Path) -> None:
    ask = Recording(checks="The border is regular.")
    AskedCaptions(VOCABULARY, ask, "m:f", (8, 60), folder=tmp_path).get(client(), "train", 0)
    prompts = [prompt for _, prompt, _ in ask.asked]
    assert len(prompts) == 1 + 2 * asked.CHECKS + 1
    assert "criticised" not in prompts[1]
    assert "criticised:\nThe border is regular." in prompts[3]
    assert "may not support:\nThe border is regular." in prompts[-1]


def test_captions_are_kept_by_the_image_whatever_its_name(tmp_path: Path) -> None:
    data, ask = client(), Recording()
    provider = AskedCaptions(VOCABULARY, ask, "m:f", (8, 60), folder=tmp_path)
    first = [provider.get(data, "train", row) for row in range(3)]
    assert len(ask.asked) == 12
    renamed = samples(data.train.images, data.train.labels, [f"other/{row}" for row in range(IMAGES)])
    elsewhere, silent = ClientData("b", renamed, data.val, data.test), Recording()
    again = AskedCaptions(VOCABULARY, silent, "m:f", (8, 60), folder=tmp_path)
    assert [again.get(elsewhere, "train", row) for row in range(3)] == first
    assert not silent.asked
    AskedCaptions(VOCABULARY, silent, "m:another", (8, 60), folder=tmp_path).get(data, "train", 0)
    AskedCaptions(VOCABULARY, silent, "m:f", (8, 30), folder=tmp_path).get(data, "train", 0)
    assert len(silent.asked) == 8  # what is asked is not the same


def test_a_damaged_or_half_written_caption_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files appear whole or not at all, and whatever else lies there is no caption."""
    data, ask = client(), Recording()
    provider = AskedCaptions(VOCABULARY, ask, "m:f", (8, 60), folder=tmp_path)
    caption = provider.get(data, "train", 0)
    (file,) = provider.folder.iterdir()
    for damage in ("", "{", "[]", '{"text": 3}'):
        file.write_text(damage)
        assert provider.get(data, "train", 0) == caption
        assert json.loads(file.read_text())["text"] == caption.text  # type: ignore[union-attr]
    file.unlink()

    def fail(source: str, target: object) -> None:
        assert json.loads(Path(source).read_text())["text"]  # whole before it has its name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(RunError, match=r"cannot be kept in .*asked \(No space left on device\)"):
        provider.get(data, "train", 0)
    assert not list(provider.folder.iterdir())


def test_a_function_that_fails_is_named_and_what_it_gave_is_kept(tmp_path: Path) -> None:
    class Failing(Recording):
        def __call__(self, image: NDArray[np.uint8], prompt: str, *, temperature: float) -> str:
            if len(self.asked) >= 4:
                raise TimeoutError("no answer")
            return super().__call__(image, prompt, temperature=temperature)

    data = client()
    provider = AskedCaptions(VOCABULARY, Failing(), "m:f", (8, 60), folder=tmp_path)
    with pytest.raises(RunError, match=r"'m:f' failed at a/train/01.png \(TimeoutError: no answer\)"):
        write_book(provider, data, "train", CaptionOptions(), seed=0)
    assert provider.get(data, "train", 0) is not None
    wrong = AskedCaptions(VOCABULARY, lambda *_, temperature: 3, "m:g", (8, 60), folder=tmp_path)  # type: ignore[arg-type,return-value,misc]
    with pytest.raises(InputError, match=r"answer about a/train/00.png is a int \(allowed: a text\)"):
        wrong.get(data, "train", 0)


def test_functions_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("captions_of_mine")
    module.ask = Recording()  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "captions_of_mine", module)
    assert function_named("captions_of_mine:ask") is module.ask
    for name, message in (
        ("captions_of_mine", r'allowed: "module:function"'),
        ("captions_of_mine:number", "has no function 'number'"),
        ("captions_of_mine:absent", "has no function 'absent'"),
        ("no_such_module:ask", r"cannot be imported \(ModuleNotFoundError.*PYTHONPATH"),
    ):
        with pytest.raises(InputError, match=message):
            function_named(name)


# Which captions are used.

GOOD = "A dermoscopy image of a brown lesion with an irregular border and several colours."


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD, None),
        ("", EMPTY),
        ("Dermoscopy image of a brown lesion, irregular.", "fewer than 8 words"),
        ("Dermoscopy image of a brown lesion, irregular border.", None),
        (f"A dermoscopy image of {'very ' * 54}dark skin.", None),  # 60 words
        (f"A dermoscopy image of {'very ' * 55}dark skin.", "more than 60 words"),
        ("I\N{RIGHT SINGLE QUOTATION MARK}m sorry, but I can't assist with this dermoscopy image.", REFUSES),
        ("As an AI I am not able to interpret this dermoscopy image of skin.", REFUSES),
        ("The lesion cannot be seen in full on this dermoscopy image.", None),
        ("A photograph of a brown lesion with an irregular border.", UNNAMED),
        ("A brown lesion of the skin with an irregular border, pigmented.", None),
        (f"{GOOD} It suggests melanoma.", None),
        (f"{GOOD} It suggests melanocytic nevi.", CONTRADICTS),
        (f"{GOOD} It suggests Melanocytic Nevi rather than melanoma.", CONTRADICTS),
        (f"{GOOD} It suggests melanoma rather than melanocytic nevi.", None),
        (f"{GOOD} No typical signs of melanocytic nevi are there.", None),
        (f"{GOOD} There is no scale; it suggests melanocytic nevi.", CONTRADICTS),
    ],
)
def test_what_the_filter_says(text: str, fault: str | None) -> None:
    """The image is a dermoscopy of a melanoma, and its client has naevi too."""
    judge = Filter.of(CaptionOptions(), VOCABULARY)
    assert judge.fault(text, modality=0, label=0, rivals=(0, 1)) == fault


def test_without_a_label_nothing_contradicts_it() -> None:
    judge, text = Filter(VOCABULARY, 8, 60), f"{GOOD} It suggests melanocytic nevi."
    assert judge.fault(text, 0, label=0, rivals=(0, 1)) == CONTRADICTS
    assert judge.fault(text, 0, label=0, rivals=(0,)) is None  # a class that this client's images cannot show
    assert judge.fault(text, 0) is None


def test_a_grade_within_the_name_of_another_is_not_it() -> None:
    words = Vocabulary([f"retinamnist:{grade}" for grade in range(5)], ("fundus",))
    judge = Filter(words, 8, 60)

    def fault(says: str, label: int) -> str | None:
        return judge.fault(f"Colour photograph of the retina of one eye, {says}.", 0, label, range(5))

    assert fault("moderate non-proliferative diabetic retinopathy", 2) is None
    assert fault("non-proliferative diabetic retinopathy of moderate degree", 2) is None
    assert fault("proliferative diabetic retinopathy", 2) == CONTRADICTS
    assert fault("severe non-proliferative diabetic retinopathy", 4) == CONTRADICTS


def test_ordinary_words_are_no_contradiction() -> None:
    judge = Filter(Vocabulary(("normal", "pneumonia"), ("chest X-ray",)), 8, 60)
    text = "A chest radiograph with a normal heart and a dense left lower lobe."
    assert judge.fault(text, 0, label=1, rivals=(0, 1)) is None
    assert judge.fault("A radiograph with a dense lobe that suggests pneumonia.", 0, 0, (0, 1)) == CONTRADICTS


@pytest.mark.parametrize(
    ("modality", "text", "named"),
    [
        ("axial abdominal CT", "the CT shows", True),
        ("axial abdominal CT", "an axial view of direct light", False),
        ("retinal OCT", "optical coherence tomography", True),
        ("mri", "T1-weighted magnetic resonance", True),
        ("blood_microscopy", "a stained smear", True),
        ("histopathology", "histological section", True),
        ("breast ultrasound", "a sonogram", True),
        ("dermatoscope", "dermoscopic view", True),
        ("fundus", "a photograph", False),
        ("image", "a photograph", True),
    ],
)
def test_modalities_by_other_words(modality: str, text: str, named: bool) -> None:
    assert Vocabulary((), (modality,)).names_modality(text, 0) is named


class Saying(LabelStating):
    """Gives the captions that it is told, by row of the client's images."""

    source = "saying"

    def __init__(self, texts: list[str | None]) -> None:
        super().__init__(VOCABULARY)
        self.texts = texts

    def describe(self, image: Labelled) -> Caption | None:
        text = self.texts[int(image.name[-6:-4])]
        return None if text is None else Caption(text, self.source)


def test_what_is_left_out_is_counted_with_its_reason() -> None:
    texts = [GOOD, None, "too short", "A drawing that shows a house, a tree and a sun.", f"{GOOD} melanoma", GOOD]
    provider = Saying(texts + [None] * 6)
    book = write_book(provider, client(), "train", CaptionOptions(filter="on"), seed=0)
    assert [caption is not None for caption in book.captions[:6]] == [True, False, False, False, True, True]
    assert book.rejected == {"fewer than 8 words": 1, UNNAMED: 1}
    assert (len(book), book.captioned, book.texts) == (IMAGES, 3, (GOOD, f"{GOOD} melanoma"))
    assert book.numbered(by_meaning=False).tolist() == [0, -1, -1, -1, 1, 0] + [-1] * 6
    unfiltered = write_book(provider, client(), "train", CaptionOptions(filter="off"), seed=0)
    assert unfiltered.captioned == 5
    blank = write_book(Saying([" "] * IMAGES), client(), "train", CaptionOptions(), seed=0)
    assert (blank.captioned, blank.rejected) == (0, {EMPTY: IMAGES})


# Coverage.


def test_coverage_is_a_share_and_a_smaller_one_is_part_of_a_larger() -> None:
    data = client(images=400)

    def covered(share: float, seed: int = 0) -> set[int]:
        book = write_book(template(), data, "train", CaptionOptions(coverage=share), seed)
        return {row for row, caption in enumerate(book.captions) if caption is not None}

    shares = [covered(share) for share in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert [len(rows) for rows in (shares[0], shares[-1])] == [0, 400]
    assert all(less <= more for less, more in itertools.pairwise(shares))
    for rows, share in zip(shares, (0.0, 0.2, 0.5, 0.8, 1.0), strict=True):
        assert abs(len(rows) - 400 * share) <= 4 * math.sqrt(400 * share * (1 - share))  # four standard deviations
    assert covered(0.5) == shares[2] != covered(0.5, seed=1)


@given(st.integers(0, 9), st.text(max_size=8))
@settings(max_examples=50)
def test_a_place_is_in_0_to_1(seed: int, name: str) -> None:
    assert 0 <= place(seed, name) < 1


def test_an_image_has_one_place_whichever_client_has_it() -> None:
    data = client(images=40)
    options = CaptionOptions(coverage=0.5)
    whole = write_book(template(), data, "train", options, seed=0).captions
    part = ClientData("b", data.train.take(range(10, 30)), data.val, data.test)
    assert write_book(template(), part, "train", options, seed=0).captions == whole[10:30]


def test_the_cap_on_duplicates_keeps_smaller_coverage_within_larger() -> None:
    data, provider = client(images=40), Saying([GOOD] * 40)

    def covered(share: float) -> tuple[set[int], Any]:
        options = CaptionOptions(coverage=share, filter="on", max_duplicates=5)
        book = write_book(provider, data, "train", options, seed=0)
        return {row for row, caption in enumerate(book.captions) if caption is not None}, book.rejected

    (half, _), (whole, rejected) = covered(0.5), covered(1.0)
    assert len(half) == len(whole) == 5
    assert rejected == {REPEATS: 35}
    (few, none) = covered(0.05)
    assert few <= half <= whole
    assert len(few) < 5
    assert not none


# What is said about them.


def test_notes_count_captions_and_explain_the_floor() -> None:
    data = client(images=60)
    options = CaptionOptions(provider="template", coverage=0.5, multi_positive=False)
    book = write_book(template(), data, "train", options, seed=0)
    counted, used, floor = notes([book], options, 32)
    assert used == IMAGES_ALONE
    assert counted == (
        f"captions: {book.captioned} of 60 training images have one (a {book.captioned} of 60); "
        f"{len(book.texts)} different texts"
    )
    sizes = list(Counter(caption.text for caption in book.captions if caption is not None).values())
    assert f"a {expected_floor(sizes, 32):.2f} (the mean of log n)" in floor
    assert "have the same text" in floor
    by_meaning = notes([book], options.model_copy(update={"multi_positive": True}), 32)[2]
    meanings = list(Counter(caption.meaning for caption in book.captions if caption is not None).values())
    assert "say the same, none of them can get more than 1/n" in by_meaning
    assert f"a {expected_floor(meanings, 32):.2f} " in by_meaning
    assert len(meanings) == 2


def test_without_any_caption_a_note_says_so(tmp_path: Path) -> None:
    empty = read_captions(written(tmp_path / "c.jsonl", []), names_of(client()))
    options = CaptionOptions(provider="file", file="c.jsonl")
    book = write_book(StatedCaptions(VOCABULARY, empty), client(), "train", options, seed=0)
    assert notes([book], options, 32) == (NO_CAPTION,)
    assert notes([book], CaptionOptions(), 32) == ()
    rejected = CaptionBook("a", "train", (None, None), {REFUSES: 2})
    assert notes([rejected], options, 32) == (NO_CAPTION, f"captions: 2 were left out (2: {REFUSES})")


def test_no_floor_is_explained_where_every_caption_is_its_own() -> None:
    data, options = client(), CaptionOptions()
    book = write_book(Saying([f"{GOOD} {row}" for row in range(IMAGES)]), data, "train", options, seed=0)
    assert len(notes([book], CaptionOptions(provider="callable", callable="a:b"), 32)) == 2
    assert notes([book], CaptionOptions(provider="callable", callable="a:b", at_test=True), 32)[1] == BOTH


def test_the_expected_floor_by_hand_and_by_every_batch() -> None:
    assert expected_floor([1, 1, 1], 2) == 0
    assert expected_floor([5], 1) == 0
    assert expected_floor([], 8) == 0
    assert expected_floor([4], 32) == pytest.approx(math.log(4))  # one batch has all
    sizes, says = [3, 2, 1], [0, 0, 0, 1, 1, 2]
    batches = [loss_floor(torch.tensor(batch)) for batch in itertools.combinations(says, 4)]
    assert expected_floor(sizes, 4) == pytest.approx(np.mean(batches))


# The loss.


def loss_by_hand(
    v: NDArray[np.float64], t: NDArray[np.float64], says: list[int], tau: float, multi_positive: bool
) -> float:
    """Eq. 4 in loops, with captioned images alone."""
    rows = [row for row, said in enumerate(says) if said >= 0]
    if len(rows) < 2:
        return 0.0
    total = 0.0
    for j in rows:
        scores = {k: v[j] @ t[k] / np.linalg.norm(v[j]) / np.linalg.norm(t[k]) / tau for k in rows}
        bottom = sum(np.exp(score) for score in scores.values())
        right = [k for k in rows if says[k] == says[j]] if multi_positive else [j]
        total -= sum(np.log(np.exp(scores[k]) / bottom) for k in right) / len(right)
    return total / len(rows)


def vectors(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("multi_positive", [False, True])
@pytest.mark.parametrize("says", [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 1, 2], [0, -1, 0, 1, -1, 2], [-1, 3, -1, -1, -1, 3]])
def test_the_loss_by_hand(says: list[int], multi_positive: bool) -> None:
    v, t = vectors(6), vectors(6, 1)
    found = caption_loss(v, t, torch.tensor(says), 0.3, multi_positive)
    assert float(found) == pytest.approx(loss_by_hand(v.numpy(), t.numpy(), says, 0.3, multi_positive), rel=1e-5)


def test_uncaptioned_images_take_no_part_and_get_no_gradient() -> None:
    says = torch.tensor([0, -1, 1, 0])
    v, t = vectors(4).requires_grad_(), vectors(4, 1).requires_grad_()
    loss = caption_loss(v, t, says, 0.07)
    loss.backward()
    assert v.grad is not None
    assert t.grad is not None
    assert not v.grad[1].any()
    assert not t.grad[1].any()
    assert v.grad[0].any()
    with torch.no_grad():
        v[1], t[1] = torch.nan, torch.inf
    assert torch.equal(caption_loss(v, t, says, 0.07), loss)


@pytest.mark.parametrize("says", [[], [-1, -1, -1], [-1, 2, -1]])
def test_with_fewer_than_two_captions_the_loss_is_0_and_can_be_trained_on(says: list[int]) -> None:
    v, t = vectors(len(says)).requires_grad_(), vectors(len(says), 1)
    loss = caption_loss(v, t, torch.tensor(says, dtype=torch.int64), 0.07, multi_positive=True)
    loss.backward()
    assert float(loss.detach()) == 0
    assert v.grad is not None
    assert not v.grad.any()
    assert loss_floor(torch.tensor(says, dtype=torch.int64)) == 0


def test_the_floor_is_the_mean_of_log_n_and_is_reached() -> None:
    says = torch.tensor([0, 0, 0, 1, 1, 2, -1])
    floor = (3 * math.log(3) + 2 * math.log(2)) / 6
    assert loss_floor(says) == pytest.approx(floor)
    t = functional.one_hot(says.clamp(min=0), 3).double()  # captions of one text have one vector
    for multi_positive in (False, True):
        assert float(caption_loss(t, t, says, 0.01, multi_positive)) == pytest.approx(floor, abs=1e-6)
    assert loss_floor(torch.tensor([4, 2, 0])) == 0


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=8), st.integers(0, 5), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_loss_is_below_the_floor(says: list[int], seed: int, multi_positive: bool, paraphrased: bool) -> None:
    """With several positives the floor holds whatever their vectors; with one alone, where equal texts have one."""
    said, v = torch.tensor(says), vectors(len(says), seed)
    own = vectors(len(says), seed + 1)
    t = own if multi_positive and paraphrased else vectors(3, seed + 1)[said.clamp(min=0)]
    assert float(caption_loss(v, t, said, 0.2, multi_positive)) >= loss_floor(said) - 1e-5


def test_several_positives_change_nothing_for_equal_texts_but_something_for_paraphrases() -> None:
    says, v = torch.tensor([0, 0, 1, 1, 2]), vectors(5)
    t = vectors(3, 1)[says]
    torch.testing.assert_close(caption_loss(v, t, says, 0.1), caption_loss(v, t, says, 0.1, True))
    paraphrases = vectors(5, 1)
    one, several = (caption_loss(v, paraphrases, says, 0.1, several) for several in (False, True))
    assert abs(float(one - several)) > 0.1


# Vectors of texts.


def test_tiny_gives_every_word_its_own_vector() -> None:
    tiny = text_encoder_for("tiny")
    first = tiny.encode("A dark LESION, a lesion.")
    assert first.shape == (5, tiny.dim)
    assert torch.equal(first[2], first[4])
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(text_encoder_for("tiny").encode("lesion")[0], first[2])
    assert tiny.encode("...").shape == (1, tiny.dim)
    rng = torch.get_rng_state()
    tiny.encode("other words")
    assert torch.equal(torch.get_rng_state(), rng)

    def likeness(one: str, other: str) -> float:
        a, b = (functional.normalize(tiny.encode(text).mean(0), dim=0) for text in (one, other))
        return float(a @ b)

    assert likeness("a dark brown lesion of the skin", "a brown lesion on dark skin") > 0.5
    assert abs(likeness("a dark brown lesion", "pale stained nuclei")) < 0.3


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", ".", "dark", "lesion", "of", "the", "skin")


def bert(folder: Path) -> Path:
    """A tiny network of the transformers library with its words and weights, in a folder."""
    transformers = pytest.importorskip("transformers", reason="extra `clip` not installed")
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=10, **size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_a_network_of_the_transformers_library_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `clip` not installed")
    encoder = text_encoder_for(f"hf:{bert(tmp_path / 'bert')}")
    assert encoder.dim == 16
    before = torch.get_rng_state()
    states = encoder.encode("A dark lesion of the skin.")
    assert torch.equal(torch.get_rng_state(), before)
    assert states.shape == (9, 16)  # six words and a stop between two special tokens
    assert not states.requires_grad
    network = transformers.BertModel.from_pretrained(tmp_path / "bert").eval()
    ids = torch.tensor([[2, 5, 7, 8, 9, 10, 11, 6, 3]])
    with torch.no_grad():
        torch.testing.assert_close(states, network(input_ids=ids).last_hidden_state[0])
    assert torch.equal(encoder.encode("A dark lesion of the skin."), states)
    long = encoder.encode("a lesion " * 20)  # positions end at 10
    assert len(long) <= 10


def test_a_folder_that_holds_no_network_is_named(tmp_path: Path) -> None:
    folder = bert(tmp_path / "bert")
    for file, message in (("model.safetensors", "its weights cannot be read"), ("config.json", "its configuration")):
        (folder / file).unlink()
        encoder = text_encoder_for(f"hf:{folder}")
        ask = encoder.encode if file == "model.safetensors" else lambda _, encoder=encoder: encoder.dim
        with pytest.raises(InputError, match=rf"captions.text_encoder = 'hf:.*bert': {message}"):
            ask("a")


def test_weights_that_lack_a_part_are_refused_not_drawn(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = bert(tmp_path / "bert")
    state = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in state.items() if not name.startswith(("pooler.", "encoder.layer.1.output"))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"weights lack encoder.layer.1.output"):
        text_encoder_for(f"hf:{folder}").encode("a")


def test_minilm_is_the_sentence_encoder_of_its_package() -> None:
    pytest.importorskip(bridge_text.PACKAGE, reason="extra `weights` not installed")
    encoder, text = text_encoder_for("minilm"), "A dermoscopy image of a melanoma."
    assert encoder.dim == bridge_text.SENTENCE
    expected = bridge_text.BridgeText("bridge:lite0-minilm").encode([text])[0, : bridge_text.SENTENCE]
    torch.testing.assert_close(functional.normalize(encoder.encode(text).mean(0), dim=0), expected)


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("transformers", reason="extra `clip` not installed")

    def refuse(request: Any, *args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError) as caught:
        _ = text_encoder_for(PUBMEDBERT).dim
    message = str(caught.value)
    for words in ("BiomedBERT", "no route to host", '"hf:PATH/TO/FOLDER"', '"minilm"', '"tiny"'):
        assert words in message
    assert "model.backbone" not in message


def test_encoders_that_cannot_be_had_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"captions.text_encoder = 'minilm2' \(did you mean 'minilm'\?\)"):
        text_encoder_for("minilm2")
    for name in ("hf:./absent", "hf:/absent", "hf:a/b/c"):
        with pytest.raises(InputError, match="there is no such folder"):
            text_encoder_for(name)
    monkeypatch.setattr(text_encoders.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    for name, extra in ((PUBMEDBERT, "clip"), ("minilm", "weights")):
        with pytest.raises(MissingExtra, match=rf"wardround\[{extra}\]"):
            text_encoder_for(name)


class Counting(TextEncoder):
    """Counts what it encodes: as many tokens as words, all of the text's length."""

    name, dim, fingerprint = "counting", 3, "counting"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, text: str) -> Tensor:
        self.seen.append(text)
        return torch.full((len(text.split()), 3), float(len(text)))


def book_of(texts: list[str | None]) -> CaptionBook:
    captions = [None if text is None else Caption(text, "t", statement=text[:1]) for text in texts]
    return CaptionBook("a", "train", tuple(captions))


def test_a_text_is_encoded_once_and_kept(tmp_path: Path) -> None:
    encoder = Counting()
    first = embed(book_of(["a b", None, "c", "a b"]), encoder, folder=tmp_path)
    assert encoder.seen == ["a b", "c"]
    again = embed(book_of(["c", "a new one", "a b"]), encoder, folder=tmp_path)
    assert encoder.seen == ["a b", "c", "a new one"]
    assert torch.equal(again.vectors[2], first.vectors[0])
    sentence = embed(book_of(["a b"]), encoder, "sentence", folder=tmp_path)
    assert len(encoder.seen) == 4  # kept apart
    assert torch.equal(sentence.vectors[0], torch.full((1, 3), 3.0).half())
    other = Counting()
    other.fingerprint = "another"
    embed(book_of(["c"]), other, folder=tmp_path)
    assert other.seen == ["c"]


def test_damaged_vectors_are_made_anew_and_a_full_disk_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Counting()
    first = embed(book_of(["a b"]), encoder, folder=tmp_path)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.suffix == ".safetensors"
    for damage in (b"", file.read_bytes()[:-1]):
        file.write_bytes(damage)
        assert torch.equal(embed(book_of(["a b"]), encoder, folder=tmp_path).vectors[0], first.vectors[0])
    assert len(encoder.seen) == 3

    def fail(source: str, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    assert len(embed(book_of(["new"]), encoder, folder=tmp_path).vectors) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_vectors_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    class Huge(Counting):
        def encode(self, text: str) -> Tensor:
            return torch.full((1, 3), 1e5)

    with pytest.raises(InputError, match="'counting': its vectors go beyond half precision at 'a'"):
        embed(book_of(["a"]), Huge(), folder=tmp_path)


def test_a_batch_is_padded_and_knows_who_has_no_caption(tmp_path: Path) -> None:
    found = embed(book_of(["a b", None, "c", "a c d", "a b"]), Counting(), folder=tmp_path)
    assert len(found) == 5
    assert found.says.tolist() == [0, -1, 1, 2, 0]
    batch = found.batch(torch.tensor([4, 1, 3]))
    assert batch.tokens.tolist() == [
        [[3.0] * 3, [3.0] * 3, [0.0] * 3],
        [[0.0] * 3] * 3,
        [[5.0] * 3] * 3,
    ]
    assert batch.mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.says.tolist() == [0, -1, 2]
    assert embed(book_of(["a b", "a c", "b"]), Counting(), by_meaning=True, folder=tmp_path).says.tolist() == [0, 0, 1]
    empty = found.batch(torch.tensor([1]))
    assert (empty.tokens.shape, empty.mask.shape) == ((1, 0, 3), (1, 0))
    assert embed(book_of([None]), Counting(), folder=tmp_path).batch(torch.tensor([0])).says.tolist() == [-1]


def test_embedding_does_not_depend_on_the_company(tmp_path: Path) -> None:
    """To the bit: alone or with others, kept or computed."""
    encoder = text_encoder_for(f"hf:{bert(tmp_path / 'bert')}")
    texts: list[str | None] = ["a lesion of the skin", "dark", "the dark skin of a lesion ."]
    together = embed(book_of(texts), encoder, folder=tmp_path / "one").vectors
    for kept in (False, True):
        for text, expected in zip(texts, together, strict=True):
            alone = embed(book_of([text]), encoder, folder=tmp_path / ("one" if kept else "two")).vectors
            assert torch.equal(alone[0], expected)
