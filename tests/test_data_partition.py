"""Partitioners, splits and caps: exact, seeded, and right in the cases that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.data import partitioners
from wardround.data.caps import quotas, stratified_cap
from wardround.data.splits import TEST, TRAIN, VAL, commonest, group_codes, grouped_split
from wardround.seeds import numpy_stream

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)
KINDS = {
    "dirichlet": partitioners.dirichlet,
    "hsu": partitioners.dirichlet_hsu,
    "quantity": partitioners.quantity,
}


def stream(seed: int = 0) -> np.random.Generator:
    return numpy_stream(seed, "test")


@settings(max_examples=40, deadline=None)
@given(LABELS, st.integers(1, 9), st.floats(0.01, 100), st.integers(0, 99), st.sampled_from(sorted(KINDS)))
def test_a_partition_is_disjoint_and_complete(labels, clients, alpha, seed, kind):
    parts = KINDS[kind](labels, clients, alpha, stream(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_partition_depends_on_its_seed_alone(kind):
    labels = np.arange(200) % 4
    one, again, other = (KINDS[kind](labels, 5, 0.5, stream(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_small_alpha_gives_a_class_to_few_clients_and_large_alpha_to_all():
    labels = np.repeat(np.arange(4), 250)

    def largest_share(alpha):
        parts = partitioners.dirichlet(labels, 5, alpha, stream())
        counts = np.stack([np.bincount(labels[part], minlength=4) for part in parts])
        return (counts / 250).max(axis=0).mean()

    assert largest_share(0.01) > 0.9
    assert largest_share(10_000) == pytest.approx(0.2, abs=0.02)


def test_class_shares_sum_to_one_for_every_class_and_mixtures_for_every_client():
    counts = np.array([10, 0, 30])
    assert np.allclose(partitioners.class_shares(counts, 4, 0.5, stream()).sum(axis=0), 1)
    mixtures = partitioners.class_mixtures(counts, 4, 0.5, stream())
    assert np.allclose(mixtures.sum(axis=1), 1)
    assert np.all(mixtures[:, 1] == 0)


def test_mixtures_follow_the_class_frequencies_when_alpha_is_large():
    mixtures = partitioners.class_mixtures(np.array([10, 30]), 50, 1e6, stream())
    assert np.allclose(mixtures, [0.25, 0.75], atol=0.01)


def test_hsu_clients_have_equal_sizes_and_their_own_classes():
    labels = np.repeat(np.arange(3), 100)
    plan = np.eye(3)
    parts = partitioners.deal_by_mixture(labels, plan, stream())
    assert [set(labels[part].tolist()) for part in parts] == [{0}, {1}, {2}]
    sizes = [len(part) for part in partitioners.dirichlet_hsu(labels, 7, 0.1, stream())]
    assert max(sizes) - min(sizes) <= 1


def test_quantity_keeps_the_class_proportions():
    labels = np.repeat([0, 1], [4000, 1000])
    for part in partitioners.quantity(labels, 4, 1.0, stream()):
        if len(part) > 200:
            assert np.mean(labels[part] == 1) == pytest.approx(0.2, abs=0.01)


def test_a_plan_cuts_a_class_at_its_running_sums():
    labels = np.zeros(10, dtype=np.int64)
    parts = partitioners.deal_by_share(labels, np.array([[0.3], [0.5], [0.2]]), stream())
    assert [len(part) for part in parts] == [3, 5, 2]


def test_by_value_gives_one_client_a_value():
    parts = partitioners.by_value(["b", "a", "b"])
    assert {name: rows.tolist() for name, rows in parts.items()} == {"a": [1], "b": [0, 2]}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_group_is_never_divided_and_every_stratum_trains(data):
    labels = data.draw(LABELS)
    groups = np.array(data.draw(st.lists(st.integers(0, 30), min_size=len(labels), max_size=len(labels))))
    split = grouped_split(labels, groups, 0.1, 0.2, stream(data.draw(st.integers(0, 9))))
    for group in np.unique(groups):
        assert len(set(split[groups == group].tolist())) == 1
    _, member_of = np.unique(groups, return_inverse=True)
    homes = commonest(labels, member_of, len(np.unique(groups)))[member_of]
    for home in np.unique(homes):
        assert TRAIN in split[homes == home]


def test_split_sizes_meet_their_targets_in_each_stratum():
    strata = np.repeat([0, 1], [100, 50])
    split = grouped_split(strata, np.arange(150), 0.1, 0.2, stream())
    assert np.bincount(split[strata == 0]).tolist() == [70, 10, 20]
    assert np.bincount(split[strata == 1]).tolist() == [35, 5, 10]


def test_tiny_strata_train_first():
    sizes = {1: [1, 0, 0], 2: [2, 0, 0], 3: [2, 0, 1], 5: [4, 0, 1]}
    for size, expected in sizes.items():
        split = grouped_split(np.zeros(size, np.int64), np.arange(size), 0.1, 0.2, stream())
        assert np.bincount(split, minlength=3).tolist() == expected


def test_a_split_of_no_share_is_empty():
    split = grouped_split(np.zeros(50, np.int64), np.arange(50), 0.0, 0.2, stream())
    assert np.count_nonzero(split == VAL) == 0
    assert np.count_nonzero(split == TEST) == 10


def test_large_groups_reach_the_test_split_too():
    groups = np.concatenate([np.repeat(np.arange(100), 3), np.arange(100, 400)])
    split = grouped_split(np.zeros(600, np.int64), groups, 0.0, 0.2, stream())
    large = np.arange(600) < 300
    assert np.mean(split[large] == TEST) == pytest.approx(0.2, abs=0.03)


def test_group_codes_make_unnamed_images_their_own_group():
    codes = group_codes(["a", "", "a", ""])
    assert codes[0] == codes[2]
    assert len(set(codes.tolist())) == 3


def test_commonest_value_of_a_group():
    values, members = np.array([5, 5, 2, 7, 2]), np.array([0, 0, 0, 1, 1])
    assert commonest(values, members, 2).tolist() == [5, 2]


@settings(max_examples=60, deadline=None)
@given(LABELS, st.integers(1, 130), st.integers(0, 9))
def test_a_cap_keeps_every_class_it_can(labels, limit, seed):
    rows = stratified_cap(labels, limit, stream(seed))
    assert len(rows) == min(limit, len(labels))
    assert np.all(np.diff(rows) > 0)
    classes = len(np.unique(labels))
    assert len(np.unique(labels[rows])) == min(classes, limit)


def test_cap_quotas_by_hand():
    # 1 each, then 97 spare over 89 + 9 + 0 others: 88.09 and 8.91
    assert quotas(np.array([90, 10, 1]), 100).tolist() == [89, 10, 1]
    # fewer places than classes: the commonest keep one
    assert quotas(np.array([5, 9, 2]), 2).tolist() == [1, 1, 0]


def test_no_cap_keeps_all():
    assert stratified_cap(np.array([1, 0]), None, stream()).tolist() == [0, 1]
