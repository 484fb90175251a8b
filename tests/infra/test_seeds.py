"""Seeds: what decides content is the same on every machine, and knows nothing of its neighbours."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from infra import seeds

MASK = (1 << 64) - 1

Scene = tuple[str, list[int]]
scenes_strategy = st.lists(
    st.tuples(
        st.text("abc-9", min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True)
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda scene: scene[0],
)


def places_of(scenes: list[Scene], seed: int) -> dict[str, dict[int, int]]:
    """Place of each caption index, by scene key."""
    keys = [key for key, indices in scenes for _ in indices]
    indices = np.array([i for _, indices in scenes for i in indices], np.int64)
    places = seeds.permutation_places(seeds.hash_keys(keys), indices, seed)
    found: dict[str, dict[int, int]] = {}
    for key, index, place in zip(keys, indices.tolist(), places.tolist(), strict=True):
        found.setdefault(key, {})[index] = place
    return found


def mixed(value: int) -> int:
    """splitmix64 in plain integers, from Steele, Lea and Flood 2014."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


@given(scenes_strategy, st.integers(0, (1 << 63) - 1))
def test_each_scene_gets_a_permutation(scenes: list[Scene], seed: int) -> None:
    found = places_of(scenes, seed)
    for key, indices in scenes:
        assert sorted(found[key].values()) == list(range(len(indices)))


@given(scenes_strategy, st.integers(0, (1 << 63) - 1))
def test_places_follow_the_rule_in_plain_integers(scenes: list[Scene], seed: int) -> None:
    found = places_of(scenes, seed)
    for key, indices in scenes:
        start = mixed(key_hash(key) ^ mixed(seed))
        ordered = sorted(indices, key=lambda i: (mixed((start + i) & MASK), i))
        assert found[key] == {index: place for place, index in enumerate(ordered)}


@given(scenes_strategy, st.integers(0, 3), st.data())
def test_removing_a_sibling_does_not_reorder_the_others(scenes: list[Scene], seed: int, data: st.DataObject) -> None:
    before = places_of(scenes, seed)
    key, indices = data.draw(st.sampled_from(scenes))
    removed = data.draw(st.sampled_from(indices))
    after = places_of([(k, [i for i in x if (k, i) != (key, removed)]) for k, x in scenes], seed).get(key, {})
    order = sorted(before[key], key=lambda i: before[key][i])
    assert sorted(after, key=lambda i: after[i]) == [i for i in order if i != removed]


@given(scenes_strategy, st.integers(0, 3), st.data())
def test_places_do_not_depend_on_the_other_scenes_nor_on_the_order_of_rows(
    scenes: list[Scene], seed: int, data: st.DataObject
) -> None:
    together = places_of(scenes, seed)
    for key, indices in scenes:
        assert places_of([(key, data.draw(st.permutations(indices)))], seed)[key] == together[key]


def test_no_captions_have_no_places() -> None:
    places = seeds.permutation_places(seeds.hash_keys([]), np.zeros(0, np.int64), 0)
    assert places.shape == (0,)
    assert places.dtype == np.int64


def test_every_caption_comes_first_equally_often() -> None:
    """Captions are ordered by length in some sets, so a draw by position would choose lengths."""
    scenes: list[Scene] = [(f"scene-{i}", [0, 1, 2, 3, 4]) for i in range(10_000)]
    firsts = np.zeros(5, np.int64)
    for places in places_of(scenes, seed=0).values():
        firsts[min(places, key=lambda i: places[i])] += 1
    assert firsts.sum() == 10_000
    # Binomial with p = .2: one standard deviation is 40.
    assert np.abs(firsts - 2000).max() < 4 * 40


def test_another_seed_is_another_permutation() -> None:
    scenes: list[Scene] = [(f"scene-{i}", [0, 1, 2, 3, 4]) for i in range(200)]
    equal = sum(a == b for a, b in zip(places_of(scenes, 0).values(), places_of(scenes, 1).values(), strict=True))
    # By chance 1 in 120.
    assert equal < 10


def test_mix_gives_the_published_first_output_of_splitmix64() -> None:
    """Seed 0 gives e220a8397b1dcdaf, in the reference implementation of Vigna too."""
    values: NDArray[np.uint64] = np.array([0, 1, MASK], np.uint64)
    assert [int(v) for v in seeds.mix(values)] == [0xE220A8397B1DCDAF, mixed(1), mixed(MASK)]


def test_key_hashes_are_blake2b_of_the_utf8_text() -> None:
    keys = ["", "a", "é", "scene-1"]
    hashes = seeds.hash_keys(keys)
    assert hashes.dtype == np.uint64
    assert [int(h) for h in hashes] == [key_hash(key) for key in keys]
    assert [int(h) for h in seeds.hash_keys([key.encode() for key in keys])] == [key_hash(key) for key in keys]


def test_derived_seeds_are_frozen() -> None:
    """The first 63 bits of blake2b-64 over the parts joined by U+001F; a change would change the bytes of versions."""
    expected = int(hashlib.blake2b(b"0\x1fviews\x1ftrain\x1f3", digest_size=8).hexdigest(), 16) >> 1
    assert seeds.derive(0, "views", "train", 3) == expected == 2006150362913022280
    assert seeds.derive(1, "views", "train", 3) != expected
    assert seeds.derive(0, "views", "train", 4) != expected


@given(
    st.lists(st.integers() | st.text("ab1"), min_size=1, max_size=4),
    st.lists(st.integers() | st.text("ab1"), max_size=4),
)
def test_other_parts_are_other_seeds(first: list[int | str], second: list[int | str]) -> None:
    same = [str(p) for p in first] == [str(p) for p in second]
    assert (seeds.derive(0, "s", *first) == seeds.derive(0, "s", *second)) == same


def test_a_separator_in_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"U\+001F"):
        seeds.derive(0, "views", "a\x1fb")
