"""Phantoms: seeded images whose differences between sites are the ones that the dials ask for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from wardround.data.phantoms import PhantomOptions, contact_sheet, phantom_federation
from wardround.data.phantoms.generate import FAMILIES, Site, shown_structure
from wardround.data.phantoms.mixture import strengths
from wardround.data.phantoms.notes import notes
from wardround.data.phantoms.scanner import TRAITS, expose, picture_traits, site_traits
from wardround.data.phantoms.skew import class_shares, exchange_levels, label_sequence, partner, site_sizes

DIALS = np.linspace(0, 1, 6)


def make(size=32, seed=0, channels=3, **keys):
    keys = {"train_per_client": 8, "val_per_client": 2, "test_per_client": 4, **keys}
    return phantom_federation(PhantomOptions(**keys), size, seed, channels)


def cheap_features(images):
    """Per channel: mean, deviation and the energies of differences at three distances; then an 8 x 8 thumbnail."""
    x = images.astype(np.float32) / 255
    parts = [x.mean((1, 2)), x.std((1, 2))]
    for d in (1, 2, 4):
        parts += [np.abs(x[:, d:] - x[:, :-d]).mean((1, 2)), np.abs(x[:, :, d:] - x[:, :, :-d]).mean((1, 2))]
    n, side = len(x), x.shape[1] // 8
    parts.append(x.reshape(n, 8, side, 8, side, -1).mean((2, 4)).reshape(n, -1))
    return np.concatenate(parts, axis=1)


# --- the images


@pytest.mark.parametrize("family", [*FAMILIES, "mixed"])
def test_same_seed_same_bytes_and_another_seed_other_images(family):
    keys = {"family": family, "train_per_client": 3, "val_per_client": 1, "test_per_client": 1}
    first, again, other = make(**keys), make(**keys), make(**keys, seed=1)
    for a, b, c in zip(first.clients, again.clients, other.clients, strict=True):
        for split in ("train", "val", "test"):
            assert np.array_equal(a.split(split).images, b.split(split).images)
            assert np.array_equal(a.split(split).labels, b.split(split).labels)
            assert not np.array_equal(a.split(split).images, c.split(split).images)


def test_no_two_images_of_a_federation_are_equal():
    federation = make()
    blobs = [image.tobytes() for c in federation.clients for s in (c.train, c.val, c.test) for image in s.images]
    assert len(set(blobs)) == len(blobs) == 4 * (8 + 2 + 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_images_stay_when_more_images_or_clients_are_asked_for(family):
    skews = {"family": family, "feature_skew": 0.7, "label_skew": 0.6}
    few = make(**skews, train_per_client=6, clients=2)
    many = make(**skews, train_per_client=14, clients=3)
    for a, b in zip(few.clients, many.clients[:2], strict=True):
        assert np.array_equal(a.train.images, b.train.images[:6])
        assert np.array_equal(a.train.labels, b.train.labels[:6])
        assert a.train.names == b.train.names[:6]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [28, 50, 224])
def test_any_size_and_channel_count(family, size):
    keys = {"family": family, "clients": 1, "classes": 8, "train_per_client": 8, "val_per_client": 0}
    for channels in (1, 3):
        images = make(size, channels=channels, test_per_client=0, feature_skew=1, **keys).clients[0].train.images
        assert images.shape == (8, size, size, channels)
        assert images.dtype == np.uint8
        assert images.std(axis=(1, 2, 3)).min() > 8


def test_one_channel_is_the_luma_of_three():
    colour, grey = make(size=28), make(size=28, channels=1)
    luma = colour.clients[1].test.images @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luma - grey.clients[1].test.images[..., 0]).max() <= 0.51


def test_only_xray_is_grey():
    for family in FAMILIES:
        images = make(family=family, clients=1, feature_skew=1).clients[0].train.images
        assert np.array_equal(images[..., 0], images[..., 2]) == (family == "xray")


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_distinct_names_and_a_painter_for_each(family):
    kind = FAMILIES[family]
    assert len(set(kind.classes)) == 8
    scenes = [kind.paint(np.random.default_rng(3), 32, strength) for strength in np.eye(8)]
    assert all(scene.shape == (3, 32, 32) and scene.dtype == np.float32 for scene in scenes)
    for a, b in itertools.combinations(scenes, 2):
        assert np.abs(a - b).mean() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_probe_tells_the_classes_apart(family):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    sizes = {"clients": 1, "train_per_client": 80, "val_per_client": 0, "test_per_client": 80}
    client = make(family=family, difficulty=0.0, **sizes).clients[0]
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))
    probe.fit(cheap_features(client.train.images), client.train.labels)
    accuracy = probe.score(cheap_features(client.test.images), client.test.labels)
    assert accuracy > 0.25 + 4 * np.sqrt(0.25 * 0.75 / 80)  # four deviations above chance


# --- difficulty


def test_difficulty_0_shows_the_own_structure_alone_and_more_makes_it_fainter():
    kind = FAMILIES["dermoscopy"]
    plain = strengths(np.random.default_rng(0), kind, 2, 4, 0.0, 0.3)
    assert plain.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    own = [strengths(np.random.default_rng(0), kind, 2, 4, d, 0.3)[2] for d in DIALS]
    assert np.all(np.diff(own) < 0)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7), st.integers(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_strengths_are_shares_of_two_structures(seed, structure, blank, difficulty, clarity):
    kind = FAMILIES["xray" if blank else "blood"]
    strength = strengths(np.random.default_rng(seed), kind, structure, 8, difficulty, clarity)
    assert strength.min() >= 0
    assert strength.max() <= 1
    assert 1 <= np.count_nonzero(strength) <= 2
    assert strength[structure] > 0


def test_a_textbook_case_shows_no_other_structure():
    for seed in range(20):
        strength = strengths(np.random.default_rng(seed), FAMILIES["blood"], 1, 4, 1.0, 1.0)
        assert np.count_nonzero(strength) == 1


# --- sizes


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
def test_sizes_keep_their_total_and_leave_no_site_empty(per_site, sites, dial, seed):
    sizes = site_sizes(per_site, sites, dial, seed)
    assert sizes.sum() == per_site * sites
    assert sizes.min() >= 1


def test_sizes_are_equal_at_0_and_spread_with_the_dial():
    assert site_sizes(200, 5, 0.0, 3).tolist() == [200] * 5
    assert site_sizes(0, 5, 1.0, 3).tolist() == [0] * 5
    spread = [site_sizes(200, 5, dial, 3).std() for dial in DIALS]
    assert np.all(np.diff(spread) > 0)
    largest = site_sizes(10_000, 5, 1.0, 3)
    assert largest.max() / largest.min() == pytest.approx(30, rel=0.01)


def test_counts_are_exact_and_quantity_leaves_the_test_sets_alone():
    federation = make(quantity_skew=1.0, train_per_client=20, val_per_client=5)
    train, val, test = ([len(c.split(s)) for c in federation.clients] for s in ("train", "val", "test"))
    assert train == site_sizes(20, 4, 1.0, 0).tolist()
    assert (sum(train), sum(val), test) == (80, 20, [4, 4, 4, 4])
    assert min(train) < 5 < 40 < max(train)


# --- labels


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8), st.integers(0, 150), st.integers(0, 50))
def test_every_beginning_of_the_labels_follows_the_shares(weights, count, more):
    shares = np.array(weights) / sum(weights)
    labels = label_sequence(shares, count)
    assert np.array_equal(labels, label_sequence(shares, count + more)[:count])
    assert np.abs(np.bincount(labels, minlength=len(shares)) - count * shares).max() < len(shares) / 2 + 1e-6


def test_label_sequence_by_hand():
    # Sainte-Lague with shares 0.6 and 0.4: quotients .6 .2 .12 .086 and .4 .133 .08, in falling order A B A B A A B
    assert label_sequence(np.array([0.6, 0.4]), 7).tolist() == [0, 1, 0, 1, 0, 0, 1]
    assert np.bincount(label_sequence(np.array([0.6, 0.4]), 10)).tolist() == [6, 4]


def test_shares_are_uniform_at_0_and_drift_apart_with_the_dial():
    assert np.allclose(class_shares(3, 4, 0.0, 7), 0.25)
    tables = [np.stack([class_shares(k, 4, dial, 7) for k in range(4)]) for dial in DIALS]
    assert all(np.allclose(t.sum(1), 1) for t in tables)
    entropy = np.array([-(t * np.log(t)).sum(1) for t in tables])
    assert np.all(np.diff(entropy, axis=0) < 0)
    apart = [np.mean([np.abs(a - b).sum() / 2 for a, b in itertools.combinations(t, 2)]) for t in tables]
    assert np.all(np.diff(apart) > 0)
    assert tables[-1].max(1).min() > 0.7
    assert sorted(tables[-1].argmax(1).tolist()) == [0, 1, 2, 3]


def test_label_dial_sets_the_counts_of_all_splits_and_loses_few_classes():
    federation = make(size=16, label_skew=1.0, train_per_client=10, val_per_client=0, test_per_client=100)
    for k, client in enumerate(federation.clients):
        shares = class_shares(k, 4, 1.0, 0)
        for split in (client.train, client.test):
            assert np.abs(split.counts(4) - len(split) * shares).max() < 2
    assert np.count_nonzero(federation.counts("test")) >= 15
    assert np.array_equal(make(size=16).counts("train"), np.full((4, 4), 2))


# --- concepts


def test_partners_are_pairs_and_the_odd_class_has_none():
    assert [partner(c, 5) for c in range(5)] == [1, 0, 3, 2, None]


def test_exchange_grows_from_nothing_to_every_pair_of_every_second_site():
    assert not exchange_levels(4, 4, 0.0).any()
    assert exchange_levels(4, 4, 1.0).tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    # four exchanges in all: at 0.375 one and a half of them, the first pair of site 1, then of site 3
    assert exchange_levels(4, 4, 0.375).tolist() == [[0, 0], [1, 0], [0, 0], [0.5, 0]]
    totals = [exchange_levels(5, 8, dial).sum() for dial in DIALS]
    assert np.allclose(np.diff(totals), 8 / 5)


def test_borderline_images_change_their_structure_first():
    site = Site("a", FAMILIES["blood"], 0, np.full(5, 0.2), np.array([0.4, 1.0]), np.zeros(9), {})
    assert [shown_structure(site, 0, clarity) for clarity in (0.0, 0.39, 0.4, 0.9)] == [1, 1, 0, 0]
    assert [shown_structure(site, label, 0.99) for label in (2, 3, 4)] == [3, 2, 4]


def test_concept_dial_keeps_the_labels_and_changes_only_the_dissenters_images():
    keys = {"family": "blood", "difficulty": 0.0}
    agreed, dissent = make(**keys), make(**keys, concept_skew=1.0)
    for k, (a, b) in enumerate(zip(agreed.clients, dissent.clients, strict=True)):
        assert np.array_equal(a.train.labels, b.train.labels)
        same = (a.train.images == b.train.images).all(axis=(1, 2, 3))
        assert same.all() if k % 2 == 0 else not same.any()
    assert sum("Concept skew" in note for note in dissent.notes) == 4
    assert not agreed.notes


# --- scanners


def test_scanners_are_fixed_by_site_and_far_from_neutral_and_from_each_other():
    traits = np.stack([site_traits(k, 5) for k in range(12)])
    assert np.array_equal(traits[4], site_traits(4, 5))
    assert not np.array_equal(traits[4], site_traits(4, 6))
    assert np.abs(traits).max() <= 1
    assert np.linalg.norm(traits, axis=1).min() > 1
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(traits, 2)) > 0.5


@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_changes_the_scan(trait):
    scene = np.random.default_rng(0).uniform(0.2, 0.8, (3, 32, 32)).astype(np.float32)
    neutral = dict.fromkeys(TRAITS, 0.0)
    plain = expose(np.random.default_rng(1), scene, neutral, grey=False)
    other = expose(np.random.default_rng(1), scene, {**neutral, trait: 0.8}, grey=False)
    assert np.abs(plain.astype(int) - other).mean() > 2


def test_a_neutral_scan_is_the_scene_up_to_its_noise():
    scene = np.full((3, 32, 32), 0.5, np.float32)
    scan = expose(np.random.default_rng(0), scene, dict.fromkeys(TRAITS, 0.0), grey=False)
    assert scan.shape == (32, 32, 3)
    assert scan.mean() == pytest.approx(127.5, abs=0.8)
    assert scan.std() == pytest.approx(2.55, rel=0.1)


def test_at_0_all_sites_share_one_distribution_of_traits():
    draws = [picture_traits(np.random.default_rng(2), site_traits(k, 0), 0.0) for k in range(3)]
    assert draws[0] == draws[1] == draws[2]


def apart(groups):
    """Mean distance between the groups' mean features `(n, d)`, in deviations of the features within a group."""
    within = np.concatenate([f - f.mean(0) for f in groups]).std(0) + 1e-6
    means = [f.mean(0) / within for f in groups]
    return float(np.mean([np.sqrt(np.mean((a - b) ** 2)) for a, b in itertools.combinations(means, 2)]))


def site_features(family, dial, clients=3):
    sizes = {"train_per_client": 24, "val_per_client": 0, "test_per_client": 0}
    federation = make(family=family, clients=clients, feature_skew=dial, **sizes)
    return [cheap_features(client.train.images) for client in federation.clients]


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_are_exchangeable_at_feature_0_and_drift_apart_with_the_dial(family):
    at_0, at_half, at_1 = (site_features(family, dial) for dial in (0.0, 0.5, 1.0))
    rng, pooled = np.random.default_rng(0), np.concatenate(at_0)
    by_chance = [apart(np.split(rng.permutation(pooled), 3)) for _ in range(99)]
    assert apart(at_0) < np.quantile(by_chance, 0.975)
    assert 1.5 * max(by_chance) < apart(at_half) < apart(at_1)


# --- the federation


def test_mixed_gives_each_site_one_family_and_the_union_of_their_classes():
    federation = make(family="mixed", clients=6, classes=3, label_skew=0.5, train_per_client=2)
    assert federation.modalities == tuple(FAMILIES)
    assert len(federation.classes) == 15
    assert federation.classes[4] == "fundus: drusen"
    for k, client in enumerate(federation.clients):
        assert set(client.test.modality.tolist()) == {k % 5}
        assert set((client.test.labels // 3).tolist()) == {k % 5}


def test_names_are_unique_and_say_where_an_image_is_from():
    federation = make(family="xray")
    names = [n for c in federation.clients for s in (c.train, c.val, c.test) for n in s.names]
    assert len(set(names)) == len(names)
    assert federation.client("site-02").train.names[3] == "phantom/xray/site-02/train/00003"


def test_notes_name_each_dial_that_is_on():
    dials = {"feature_skew": 0.5, "label_skew": 0.25, "quantity_skew": 1.0}
    sentences = notes(PhantomOptions(family="mixed", **dials))
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "Feature skew 0.5",
        "Label skew 0.25",
        "Quantity skew 1",
        "Mixed families",
    ]


@pytest.mark.parametrize(("size", "channels", "word"), [(8, 3, "image_size = 8"), (32, 2, "channels = 2")])
def test_bad_sizes_are_named(size, channels, word):
    from wardround.errors import InputError

    with pytest.raises(InputError, match=word):
        make(size, channels=channels)


@pytest.mark.parametrize("bad", [{"classes": 9}, {"feature_skew": 1.1}, {"family": "mri"}, {"clients": 0}, {"x": 1}])
def test_bad_options_are_refused(bad):
    with pytest.raises(ValidationError):
        PhantomOptions(**bad)


@pytest.mark.parametrize("channels", [1, 3])
def test_contact_sheet_shows_every_class_and_site(channels):
    federation = make(size=16, channels=channels)
    sheet = np.asarray(contact_sheet(federation, per_class=2))
    assert sheet.shape == (18 + 4 * 20, 130 + 4 * 36, 3)
    third = federation.clients[2].train
    first = third.images[np.flatnonzero(third.labels == 1)[0]]
    assert np.array_equal(sheet[38:54, 202:218], np.broadcast_to(first, (16, 16, 3)))
