"""Views are spans of the right captions and sizes, and depend on nothing but their own names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import seeds
from infra.errors import ConfigError, IntegrityError
from trainer.data.captions import Captions
from trainer.data.ragged import Ragged, offsets_of
from trainer.data.tokenizer import SpecialIds
from trainer.data.views import Draws, ViewsConfig, good_samples, make_views, whole_captions

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
DRAWS = Draws(seed=0, epoch=0, good_fraction=1.0, caption_seed=7, bad_passes=5)
UNMASKED = ViewsConfig(masked=0.0)


def captions_of(lengths: list[list[int]], *, first: int = 0) -> Captions:
    """Scenes with captions of these lengths; token = 10 + running number, so that a token names caption and place."""
    counts = np.array([len(scene) for scene in lengths], np.int64)
    flat = np.array([n for scene in lengths for n in scene], np.int64)
    keys = [f"scene-{first + i}" for i in range(len(lengths))]
    return Captions(
        tokens=(10 + np.arange(flat.sum())).astype(np.int32),
        caption_offsets=offsets_of(flat),
        caption_index=np.array([i for n in counts for i in range(n)], np.int64),
        roles=np.zeros(len(flat), np.int8),
        scene_offsets=offsets_of(counts),
        scene_hashes=seeds.hash_keys(keys),
    )


def many(scenes: int, captions: int = 5, tokens: int = 20) -> Captions:
    return captions_of([[tokens] * captions] * scenes)


def draws(**changes: Any) -> Draws:
    return dataclasses.replace(DRAWS, **changes)


def caption_of(captions: Captions, views: Ragged) -> np.ndarray:
    """Row among the captions that each unmasked view was cut from."""
    return np.searchsorted(captions.caption_offsets, views.tokens[views.offsets[:-1] + 1] - 10, side="right") - 1


scene_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12)


@given(scene_lengths, st.floats(0, 1), st.integers(0, 12), st.integers(3, 40))
def test_each_view_is_one_span_of_one_caption_of_its_scene(
    lengths: list[list[int]], good: float, epoch: int, max_tokens: int
) -> None:
    captions = captions_of(lengths)
    config = ViewsConfig(masked=0.0, max_tokens=max_tokens)
    views, _ = make_views(captions, draws(good_fraction=good, epoch=epoch), config, SPECIAL)
    assert len(views) == 8 * len(lengths)
    chosen = caption_of(captions, views)
    for row in range(len(views)):
        cls, *span, sep = views.row(row).tolist()
        view, scene = divmod(row, len(lengths))
        start, stop = captions.caption_offsets[chosen[row]], captions.caption_offsets[chosen[row] + 1]
        n = min(stop - start, max_tokens - 2)
        low, high = (0.5, 1.0) if view < 2 else (0.15, 0.5)
        assert (cls, sep) == (2, 3)
        assert span == list(range(span[0], span[0] + len(span)))
        assert captions.scene_offsets[scene] <= chosen[row] < captions.scene_offsets[scene + 1]
        assert start + 10 <= span[0] and span[-1] < start + 10 + n
        assert len(span) == 1 or low * n - 1e-9 <= len(span) <= high * n + 1e-9
        assert len(span) >= 1 and (view >= 2 or len(span) >= n / 2)


@given(scene_lengths, st.integers(0, 2**40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_view_depends_on_its_scene_alone_and_not_on_the_batch(
    lengths: list[list[int]], seed: int, epoch: int, random: Any
) -> None:
    captions = captions_of(lengths)
    how = draws(seed=seed, epoch=epoch, good_fraction=0.5)
    whole, read = make_views(captions, how, ViewsConfig(), SPECIAL)
    rows = list(range(len(lengths)))
    random.shuffle(rows)
    cut = random.randint(0, len(rows))
    parts = [np.array(part, np.int64) for part in (rows[:cut], rows[cut:]) if part]
    total = 0
    for part in parts:
        views, tokens = make_views(captions.take(part), how, ViewsConfig(), SPECIAL)
        total += tokens
        for i, scene in enumerate(part.tolist()):
            for view in range(8):
                mine = views.row(view * len(part) + i).tolist()
                assert mine == whole.row(view * len(lengths) + scene).tolist()
    assert total == read


def test_views_change_with_seed_epoch_scene_and_view() -> None:
    captions = many(50)
    first, _ = make_views(captions, DRAWS, UNMASKED, SPECIAL)
    for other in (draws(seed=1), draws(epoch=1)):
        changed, _ = make_views(captions, other, UNMASKED, SPECIAL)
        same = [first.row(i).tolist() == changed.row(i).tolist() for i in range(len(first))]
        assert sum(same) < 0.1 * len(same)
    places = (first.tokens[first.offsets[:-1] + 1] - 10) % 100  # place in the scene's 100 tokens
    assert len(set(places.tolist())) > 60


def test_good_views_draw_captions_with_replacement_and_evenly() -> None:
    captions = many(4_000)
    views, read = make_views(captions, DRAWS, UNMASKED, SPECIAL)
    chosen = caption_of(captions, views).reshape(8, 4_000) % 5
    shares = np.bincount(chosen.ravel(), minlength=5) / chosen.size
    assert np.abs(shares - 0.2).max() < 0.01
    assert abs(np.mean(chosen[0] == chosen[1]) - 0.2) < 0.03  # independent of one another
    assert read == 4_000 * 100


def test_bad_views_share_the_caption_of_the_pass_and_see_each_in_turn() -> None:
    captions = captions_of([[20] * 5, [20] * 3, [20]] * 40)
    seen: list[np.ndarray] = []
    for epoch in range(10):
        views, read = make_views(captions, draws(good_fraction=0.0, epoch=epoch), UNMASKED, SPECIAL)
        chosen = caption_of(captions, views).reshape(8, 120)
        assert (chosen == chosen[0]).all()
        assert read == 120 * 20
        places = seeds.permutation_places(
            np.repeat(captions.scene_hashes, captions.counts), captions.caption_index, DRAWS.caption_seed
        )
        assert (places[chosen[0]] == epoch % 5 % captions.counts).all()
        seen.append(chosen[0])
    table = np.array(seen)
    assert (table[:5] == table[5:]).all()
    assert [len(set(table[:5, i])) for i in range(3)] == [5, 3, 1]


def test_fraction_point_3_gives_point_3_and_other_scenes_in_each_epoch() -> None:
    captions = many(20_000, captions=2, tokens=3)
    is_good = [good_samples(captions.scene_hashes, draws(good_fraction=0.3, epoch=e)) for e in range(3)]
    assert all(abs(g.mean() - 0.3) < 0.01 for g in is_good)  # 3 standard deviations
    assert abs(np.mean(is_good[0] & is_good[1]) - 0.09) < 0.01
    assert not good_samples(captions.scene_hashes, draws(good_fraction=0.0)).any()
    assert good_samples(captions.scene_hashes, draws(good_fraction=1.0)).all()
    wider = good_samples(captions.scene_hashes, draws(good_fraction=0.5))
    assert (is_good[0] <= wider).all()  # a larger fraction keeps who was good


def test_a_good_sample_of_a_mixed_run_has_the_views_of_the_good_run() -> None:
    captions = many(300)
    good, bad, mixed = (make_views(captions, draws(good_fraction=f), UNMASKED, SPECIAL)[0] for f in (1.0, 0.0, 0.3))
    is_good = good_samples(captions.scene_hashes, draws(good_fraction=0.3))
    assert 0 < is_good.sum() < 300
    for row in range(len(mixed)):
        expected = good if is_good[row % 300] else bad
        assert mixed.row(row).tolist() == expected.row(row).tolist()


def test_fifteen_percent_of_the_tokens_are_hidden_and_never_a_border() -> None:
    captions = many(3_000, tokens=40)
    plain, _ = make_views(captions, DRAWS, UNMASKED, SPECIAL)
    hidden, _ = make_views(captions, DRAWS, ViewsConfig(), SPECIAL)
    is_mask = hidden.tokens == SPECIAL.mask
    assert (hidden.offsets == plain.offsets).all()
    assert (hidden.tokens[~is_mask] == plain.tokens[~is_mask]).all()
    text = plain.tokens >= 10
    assert not is_mask[~text].any()
    assert abs(is_mask[text].mean() - 0.15) < 0.003
    assert (hidden.tokens[hidden.offsets[:-1]] == SPECIAL.cls).all()


@given(scene_lengths)
def test_a_view_never_hides_all_it_shows(lengths: list[list[int]]) -> None:
    views, _ = make_views(captions_of(lengths), DRAWS, ViewsConfig(masked=0.95), SPECIAL)
    assert all((views.row(i)[1:-1] != SPECIAL.mask).any() for i in range(len(views)))


def test_whole_captions_are_whole_and_cut_at_the_maximum() -> None:
    captions = captions_of([[4, 9], [30]])
    views, read = make_views(captions, draws(good_fraction=0.0), whole_captions(1, max_tokens=12), SPECIAL)
    assert len(views) == 2
    assert views.row(1).tolist() == [2, *range(23, 33), 3]
    assert views.row(0).tolist() in ([2, *range(10, 14), 3], [2, *range(14, 23), 3])
    assert read == len(views.tokens) - 4


def test_a_caption_pair_is_two_different_captions_as_long_as_there_are_two() -> None:
    captions = captions_of([[5] * 5, [5] * 2, [5]] * 200)
    seen = set()
    for epoch in range(6):
        views, _ = make_views(captions, draws(epoch=epoch), whole_captions(2, max_tokens=64), SPECIAL)
        pairs = caption_of(captions, views).reshape(2, 600)
        is_different = pairs[0] != pairs[1]
        assert is_different.reshape(200, 3).all(0).tolist() == [True, True, False]
        assert (views.lengths == 7).all()
        seen |= set(map(tuple, (pairs[:, ::3] - captions.scene_offsets[:-1][::3]).T.tolist()))
    assert seen == {(a, b) for a in range(5) for b in range(5) if a != b}  # every ordered pair occurs


def test_tokens_read_counts_the_group_a_sample_may_draw_from() -> None:
    captions = captions_of([[4, 9, 30], [7]])
    config = ViewsConfig(max_tokens=12)
    assert make_views(captions, DRAWS, config, SPECIAL)[1] == 4 + 9 + 10 + 7
    bad = make_views(captions, draws(good_fraction=0.0), config, SPECIAL)[1]
    assert bad - 7 in (4, 9, 10)


def test_narrow_tokens_of_the_cache_give_the_same_views() -> None:
    captions = many(40)
    narrow = dataclasses.replace(captions, tokens=captions.tokens.astype(np.uint16))
    wide_views, narrow_views = (make_views(c, DRAWS, ViewsConfig(), SPECIAL)[0] for c in (captions, narrow))
    assert wide_views.tokens.tolist() == narrow_views.tokens.tolist()
    assert narrow_views.tokens.dtype == np.int32


def test_a_scene_without_captions_is_refused() -> None:
    captions = many(3).where(np.array([False] * 5 + [True] * 10))
    with pytest.raises(IntegrityError, match="has no caption to show"):
        make_views(captions, DRAWS, ViewsConfig(), SPECIAL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_global": 0},
        {"n_local": -1},
        {"global_span": (0.0, 1.0)},
        {"local_span": (0.6, 0.5)},
        {"global_span": (0.5, 1.5)},
        {"masked": 1.0},
        {"max_tokens": 2},
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="views"):
        ViewsConfig(**wrong)


@given(scene_lengths, st.data())
def test_choosing_scenes_is_what_a_loop_over_them_would_choose(lengths: list[list[int]], data: st.DataObject) -> None:
    captions = captions_of(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    keep = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(captions.roles), max_size=len(captions.roles))), bool
    )
    for chosen, kept in ((captions.take(np.array(rows, np.int64)), None), (captions.where(keep), keep)):
        expected = []
        for scene in rows if kept is None else range(len(lengths)):
            numbers = range(captions.scene_offsets[scene], captions.scene_offsets[scene + 1])
            edges = captions.caption_offsets
            expected.append(
                [captions.tokens[edges[c] : edges[c + 1]].tolist() for c in numbers if kept is None or kept[c]]
            )
        found = []
        for scene in range(len(chosen)):
            numbers = range(chosen.scene_offsets[scene], chosen.scene_offsets[scene + 1])
            edges = chosen.caption_offsets
            found.append([chosen.tokens[edges[c] : edges[c + 1]].tolist() for c in numbers])
        assert found == expected
