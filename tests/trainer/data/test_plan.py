"""The order of samples is arithmetic: the same for any ranks, each scene once an epoch, and resumable at any step."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError, ConflictError, InputError, IntegrityError
from infra.home import Home
from trainer.data.plan import Cursor, Plan, PlanConfig, make_plan
from trainer.data.plan_summary import plan_facts
from trainer.data.shardset import ShardSet, open_shards

NO_HOME = Home(url="/nonexistent", catalog="/nonexistent/catalog.sqlite")


def shard_set(sizes: list[int], **changes: Any) -> ShardSet:
    """Shards of the given sizes, without files."""
    values: dict[str, Any] = {
        "folder": "/nonexistent",
        "dataset": "d",
        "version": "v",
        "split": "train",
        "kind": "good",
        "numbers": np.arange(len(sizes)),
        "scenes": np.array(sizes, np.int64),
        "captions": np.array(sizes, np.int64) * 2,
        "captions_per_scene": {2: sum(sizes)},
        "caption_seed": 0,
        "bad_passes": 5,
    }
    return ShardSet(**(values | changes))


def plan_of(sizes: list[int], **config: Any) -> Plan:
    return make_plan(PlanConfig(**({"epochs": 2, "batch_global": 16} | config)), shard_set(sizes), NO_HOME)


def addresses(plan: Plan, epoch: int, lanes: tuple[int, int] | None = None) -> list[list[tuple[int, int]]]:
    """(ordinal, row) of each sample, by step of the epoch."""
    order = plan.order(epoch)
    steps: list[list[tuple[int, int]]] = []
    for window in range(-(-plan.steps_per_epoch // plan.steps_per_window)):
        ordinals, rows = order.window(window, lanes or (0, plan.config.lane_count))
        steps += [list(zip(o, r, strict=True)) for o, r in zip(ordinals.tolist(), rows.tolist(), strict=True)]
    return steps


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: 1 to 9 shards, some with a single scene, any batch, lanes that divide it, small windows."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    batch = draw(st.integers(1, min(24, sum(sizes))))
    lanes = draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    return plan_of(
        sizes, batch_global=batch, lanes=lanes, window=draw(st.integers(1, 40)), seed=draw(st.integers(0, 2**40))
    )


@given(plans(), st.integers(0, 3))
def test_e5_e6_each_scene_is_drawn_once_an_epoch_but_for_the_printed_remainder(plan: Plan, epoch: int) -> None:
    steps = addresses(plan, epoch)
    drawn = [a for step in steps for a in step]
    everything = {(i, row) for i, n in enumerate(plan.scenes.tolist()) for row in range(n)}
    assert [len(step) for step in steps] == [plan.config.batch_global] * plan.steps_per_epoch
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= everything
    assert len(everything) - len(drawn) == plan.drops_per_epoch < plan.config.batch_global


@given(plans(), st.integers(0, 1))
def test_e2_e5_the_stripes_of_all_ranks_are_disjoint_and_make_up_the_global_batch_in_order(
    plan: Plan, epoch: int
) -> None:
    whole = addresses(plan, epoch)
    lanes = plan.config.lane_count
    for world in [w for w in range(1, lanes + 1) if lanes % w == 0]:
        parts = [addresses(plan, epoch, plan.stripe(rank, world)) for rank in range(world)]
        assert {len(part) for part in parts} == {plan.steps_per_epoch}
        assert [[a for part in parts for a in part[s]] for s in range(len(whole))] == whole


@given(plans(), st.integers(0, 2))
def test_every_shard_is_announced_for_the_steps_that_read_it(plan: Plan, epoch: int) -> None:
    lanes = plan.config.lane_count
    world = min(w for w in range(1, lanes + 1) if lanes % w == 0 and w > 1) if lanes > 1 else 1
    for rank in range(world):
        stripe = plan.stripe(rank, world)
        ahead = {ordinal: (first, last) for first, last, ordinal in plan.order(epoch).shards_ahead(stripe)}
        read: dict[int, list[int]] = {}
        for step, batch in enumerate(addresses(plan, epoch, stripe)):
            for ordinal, _ in batch:
                read.setdefault(ordinal, []).append(step)
        assert ahead.keys() == read.keys()
        assert all(ahead[o][0] <= min(steps) and max(steps) <= ahead[o][1] for o, steps in read.items())


@given(plans())
def test_a_lane_reads_its_shards_in_sequence_window_after_window(plan: Plan) -> None:
    """Each shard is one stretch of neighbouring windows, so a tar is never gone back to."""
    for lane in range(plan.config.lane_count):
        windows: dict[int, list[int]] = {}
        for step, batch in enumerate(addresses(plan, 0, (lane, lane + 1))):
            for ordinal, _ in batch:
                windows.setdefault(ordinal, []).append(step // plan.steps_per_window)
        if len(plan.scenes) > 1 and plan.config.lane_count > 1:
            for seen in windows.values():
                assert sorted(set(seen)) == list(range(min(seen), max(seen) + 1)) or _wraps(plan, seen)


def _wraps(plan: Plan, seen: list[int]) -> bool:
    """The shard in which the circle was cut may stand at both ends of one long lane."""
    return plan.config.lane_count * max(plan.scenes) >= plan.scenes_per_epoch and max(seen) - min(seen) > 0


def test_e4_none_of_146_shards_is_lost_on_8_ranks() -> None:
    """E4 (NVIDIA-NeMo/Speech#4553): 146 shards on 8 ranks lost 2,000 samples; here at most one batch, and printed."""
    rng = np.random.default_rng(0)
    plan = plan_of(rng.integers(500, 1500, 146).tolist(), batch_global=256, lanes=64)
    parts = [addresses(plan, 0, plan.stripe(rank, 8)) for rank in range(8)]
    drawn = {a for part in parts for step in part for a in step}
    assert len(drawn) == plan.scenes_per_epoch - plan.drops_per_epoch
    assert {len(part) for part in parts} == {plan.steps_per_epoch}
    assert plan.drops_per_epoch < 256


@pytest.mark.parametrize("sizes", [[64], [20, 20, 24], [40, 24]])
def test_e1_fewer_shards_than_ranks_gives_every_rank_the_same_steps(sizes: list[int]) -> None:
    plan = plan_of(sizes, batch_global=16, lanes=16)
    parts = [addresses(plan, 0, plan.stripe(rank, 16)) for rank in range(16)]
    assert {len(part) for part in parts} == {4}
    assert {len(step) for part in parts for step in part} == {1}


def test_with_one_shard_and_one_scene_too_many_another_scene_is_left_out_each_epoch() -> None:
    plan = plan_of([17], batch_global=16, epochs=40)
    assert (plan.steps_per_epoch, plan.drops_per_epoch) == (1, 1)
    everything = {(0, row) for row in range(17)}
    dropped = [everything - {a for step in addresses(plan, epoch) for a in step} for epoch in range(40)]
    assert {len(d) for d in dropped} == {1}
    assert len(set().union(*dropped)) > 10


def test_e24_the_order_is_not_that_of_the_shards_and_differs_between_epochs_and_seeds() -> None:
    plan = plan_of([50] * 8, batch_global=8, lanes=4, window=25)
    orders = [
        addresses(plan, 0),
        addresses(plan, 1),
        addresses(plan_of([50] * 8, batch_global=8, lanes=4, window=25, seed=1), 0),
    ]
    flat = [[a for step in order for a in step] for order in orders]
    assert all(sorted(f) == sorted(flat[0]) for f in flat)
    assert flat[0] != sorted(flat[0])
    assert flat[0] != flat[1] != flat[2] != flat[0]
    first_shards = [step[0][0] for step in orders[0]]
    assert first_shards != sorted(first_shards)


def test_the_default_lanes_are_the_largest_power_of_two_up_to_64_in_the_batch() -> None:
    assert {b: PlanConfig(batch_global=b, epochs=1).lane_count for b in (256, 2048, 48, 250, 7)} == {
        256: 64,
        2048: 64,
        48: 16,
        250: 2,
        7: 1,
    }


def test_e20_the_length_is_exact_for_epochs_and_for_samples() -> None:
    assert plan_of([100], batch_global=16, epochs=3).total_steps == 18
    assert plan_of([100], batch_global=16, epochs=None, samples=200).total_steps == 12
    assert plan_of([100], batch_global=16, epochs=None, samples=1000).total_steps == 62
    assert plan_of([100], batch_global=16, epochs=3).locate(17) == (2, 5)


def test_e15_d12_a_cursor_is_valid_on_any_ranks_but_refused_under_another_plan() -> None:
    plan = plan_of([100, 50], batch_global=16)
    cursor = plan.cursor(7)
    assert plan.resume(cursor) == 7
    assert plan_of([100, 50], batch_global=16, epochs=9).resume(cursor) == 7
    others: list[dict[str, Any]] = [
        {"batch_global": 8},
        {"seed": 1},
        {"lanes": 4},
        {"window": 16},
        {"good_fraction": 0.5},
    ]
    for other in others:
        with pytest.raises(ConflictError, match=r"plan .* differ, so step 7 means other samples"):
            plan_of([100, 50], **other).resume(cursor)
    with pytest.raises(ConflictError):
        plan_of([100, 49]).resume(cursor)
    with pytest.raises(ConflictError, match="changed by hand"):
        plan.resume(Cursor(step=-1, plan_digest=plan.digest))


def test_the_digest_leaves_out_what_does_not_change_the_sequence() -> None:
    digest = plan_of([100], batch_global=16).digest
    assert plan_of([100], batch_global=16, lanes=16).digest == digest  # the default, written out
    pairs = [plan_of([100], batch_global=32, lanes=16, window=window).digest for window in (4_095, 4_096, 4_097)]
    assert pairs[0] == pairs[1] != pairs[2]  # rounded up to whole steps, of two scenes of a lane each
    bad = make_plan(PlanConfig(epochs=2, batch_global=16, good_fraction=0.0), shard_set([100], kind="bad"), NO_HOME)
    assert bad.digest == plan_of([100], batch_global=16, good_fraction=0.0).digest  # the tars hold the same samples
    assert copy.deepcopy(bad).digest == bad.digest
    assert len(pickle.dumps(bad)) < 4_000  # what Ray sends to every worker


def test_ranks_that_do_not_divide_the_lanes_are_refused_before_any_process_group() -> None:
    plan = plan_of([100], batch_global=16)
    with pytest.raises(ConfigError, match=r"3 ranks do not divide the 16 lanes .* Use 1, 2, 4, 8, 16 ranks"):
        plan.stripe(0, 3)
    with pytest.raises(ConfigError, match="no rank 4"):
        plan.stripe(4, 4)


def test_an_epoch_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 15 scenes to train on, so an epoch has no step"):
        plan_of([10, 5], batch_global=16)
    with pytest.raises(ConfigError, match="less than one batch"):
        plan_of([100], batch_global=16, epochs=None, samples=15)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lanes": 3},
        {"lanes": 0},
        {"batch_global": 0},
        {"samples": 5},
        {"epochs": 0},
        {"epochs": None},
        {"good_fraction": 1.1},
        {"roles": ("humn",)},
        {"seed": -1},
        {"window": 0},
    ],
)
def test_a_wrong_config_is_refused_by_a_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"[a-z]"):
        PlanConfig(**({"epochs": 2, "batch_global": 16} | wrong))


# --- published versions -------------------------------------------------------------------------------------------


def test_d10_the_manifests_and_not_their_numbers_define_the_shards(
    home: Home, publish: Callable[..., str], make_scenes: Callable[..., Any]
) -> None:
    """D10 (img2dataset#174): shard 3 is missing because it never existed, and nothing asks for it."""
    publish({2: make_scenes(20, prefix="a"), 5: make_scenes(30, prefix="b"), 11: make_scenes(14, prefix="c")})
    shards = open_shards(home, "tiny", "v1", "train")
    assert shards.numbers.tolist() == [2, 5, 11]
    plan = make_plan(PlanConfig(batch_global=8, epochs=1), shards, home)
    assert sum(len(step) for step in addresses(plan, 0)) == 64


def test_b9_a_missing_or_cut_off_tar_is_found_before_training(home: Home, publish: Callable[..., str]) -> None:
    from pathlib import Path

    folder = Path(publish([20, 20]))
    tar = folder / "views/good/train-00001.tar"
    data = tar.read_bytes()
    tar.write_bytes(data[: len(data) * 9 // 10])
    with pytest.raises(IntegrityError, match=r"train-00001\.tar .* its manifest says"):
        open_shards(home, "tiny", "v1", "train")
    tar.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        open_shards(home, "tiny", "v1", "train")
    assert open_shards(home, "tiny", "v1", "train", kind="bad").kind == "bad"  # those tars are whole


def test_unknown_names_are_refused_with_the_known_ones(home: Home, publish: Callable[..., str]) -> None:
    publish([20])
    with pytest.raises(InputError, match="Known are tiny"):
        open_shards(home, "tinny", "v1", "train")
    with pytest.raises(InputError, match="Its splits are train"):
        open_shards(home, "tiny", "v1", "trian")
    with pytest.raises(InputError, match="has no ugly tars"):
        open_shards(home, "tiny", "v1", "train", kind="ugly")


def test_scenes_without_a_caption_of_the_roles_and_excluded_ones_are_left_out_of_the_plan(
    home: Home, publish: Callable[..., str], make_scenes: Callable[..., Any], tmp_path: Any
) -> None:
    rows = {0: make_scenes(60, prefix="a"), 1: make_scenes(40, prefix="b")}
    publish(rows)
    shards = open_shards(home, "tiny", "v1", "train")
    listed = tmp_path / "leave-out.txt"
    listed.write_text("a00003\n\n a00007 \nb00001\nnot-there\n")
    excluded = {"a00003", "a00007", "b00001"}
    has_human = [sum(any(c[1] == "human" for c in captions) for _, captions in r) for r in rows.values()]
    both = [
        sum(any(c[1] == "human" for c in captions) and key not in excluded for key, captions in r)
        for r in rows.values()
    ]
    assert 0 < sum(has_human) < 100

    def counts(**config: Any) -> list[int]:
        return [int(n) for n in make_plan(PlanConfig(batch_global=4, epochs=1, **config), shards, home).scenes]

    assert counts(roles=("human",)) == has_human == counts(roles=("human",))  # counted, then from the cache
    assert counts(exclude=str(listed)) == [58, 39]
    assert counts(roles=("human",), exclude=str(listed)) == both
    assert counts(roles=("human", "alt", "recap")) == [60, 40]
    plan = make_plan(PlanConfig(batch_global=4, epochs=1, exclude=str(listed)), shards, home)
    assert plan_facts(plan, None).scenes_left_out == 3
    listed.write_text("a00004\na00007\nb00001\n")
    assert make_plan(plan.config, shards, home).digest != plan.digest  # the list's content counts, not its name


def test_bad_tars_give_neither_good_views_nor_roles(home: Home, publish: Callable[..., str]) -> None:
    publish([20])
    shards = open_shards(home, "tiny", "v1", "train", kind="bad")
    for config in ({"good_fraction": 0.5}, {"good_fraction": 0.0, "roles": ("human",)}):
        with pytest.raises(ConfigError, match="Read the good tars"):
            make_plan(PlanConfig(batch_global=4, epochs=1, **config), shards, home)


def test_the_facts_count_steps_drops_and_repeats() -> None:
    shards = shard_set([40, 24], captions_per_scene={1: 10, 3: 50, 7: 4}, captions=np.array([100, 88]), bad_passes=5)
    config = PlanConfig(batch_global=16, epochs=4, good_fraction=0.0)
    plan = make_plan(config, shards, NO_HOME)
    from trainer.data import plan_summary

    assert plan_summary._repeats(plan) == 10 * 3 + 50 * 1 + 4 * 0  # 4 epochs show min(n, 4) different captions
    assert plan_summary._repeats(dataclasses.replace(plan, config=dataclasses.replace(config, good_fraction=1.0))) == 0
    longer = dataclasses.replace(plan, config=dataclasses.replace(config, epochs=12))
    assert (
        plan_summary._repeats(longer) == 10 * 11 + 50 * 9 + 4 * 7
    )  # 5 passes, so a scene of 7 captions shows 5 of them


def test_token_estimates_from_bytes_and_from_the_cache_agree(
    home: Home, publish: Callable[..., str], words: Any
) -> None:
    from trainer.data.cache import TokenCache

    publish([60, 50])
    shards = open_shards(home, "tiny", "v1", "train")
    cache = TokenCache(shards, words, home)
    plan = make_plan(PlanConfig(batch_global=10, epochs=3), shards, home)
    estimates = [plan_facts(plan, cache)]
    for ordinal in (0, 1):
        cache.open(ordinal)
        estimates.append(plan_facts(plan, cache))
    assert [e.tokens_from for e in estimates] == ["bytes", "part of the cache", "cache"]
    exact = sum(int(cache.open(i).captions.lengths.sum()) for i in (0, 1)) * 3
    assert estimates[2].tokens == exact  # no drops: 110 scenes in batches of 10
    assert all(abs(e.tokens - exact) < 0.35 * exact for e in estimates)
    one = plan_facts(make_plan(PlanConfig(batch_global=10, epochs=3, good_fraction=0.0), shards, home), cache)
    assert one.tokens == round(exact / int(shards.captions.sum()) * 110)
