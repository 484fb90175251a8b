"""One sequence of global batches, whatever the ranks, workers, shards, and wherever it was begun."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trainer
from catalog import schema
from infra import storage
from infra.errors import ConfigError, ConflictError, IntegrityError
from infra.home import Home
from infra.seeds import hash_keys
from trainer.data import wordpiece
from trainer.data.cache import TokenCache
from trainer.data.plan import PlanConfig, make_plan
from trainer.data.shardset import open_shards
from trainer.data.stream import StepBatch, Stream
from trainer.data.tokenizer import TextTokenizer
from trainer.data.views import ViewsConfig, whole_captions
from trainer.run import records

REPOSITORY = Path(trainer.__file__).parents[1]
BATCH = 16
LAYOUTS = {
    "one shard": [257],
    "three shards": [90, 80, 87],
    "fewer shards than ranks": [130, 70],
    "one scene more than a batch": [BATCH + 1],
    "tiny shards": [5, 1, 30, 2, 9, 1],
}

GlobalBatch = tuple[int, list[int], list[list[int]], int]
"Epoch, scene hashes, views of each scene one after another, tokens read."


def stream(
    home: Home, words: TextTokenizer, *, kind: str = "good", views: ViewsConfig | None = None, **options: Any
) -> Stream:
    """A stream over the dataset `tiny`; options of the plan and of `Stream` together."""
    ranks = {name: options.pop(name) for name in ("rank", "world", "workers") if name in options}
    config = PlanConfig(**({"batch_global": BATCH, "epochs": 3, "window": 20} | options))
    shards = open_shards(home, "tiny", "v1", "train", kind=kind)
    plan = make_plan(config, shards, home)
    return Stream(plan, TokenCache(shards, words, home), views or ViewsConfig(), **ranks)


def joined(parts: list[StepBatch]) -> GlobalBatch:
    """The global batch of one step from the batches of all ranks."""
    assert len({p.step for p in parts}) == len({p.epoch for p in parts}) == 1
    assert np.concatenate([p.places for p in parts]).tolist() == list(range(sum(len(p.places) for p in parts)))
    views = []
    for part in parts:
        b = len(part.scene_hashes)
        views += [[t for row in range(i, len(part.views), b) for t in part.views.row(row).tolist()] for i in range(b)]
    hashes = np.concatenate([p.scene_hashes for p in parts]).tolist()
    return parts[0].epoch, hashes, views, sum(p.tokens_read for p in parts)


def run(
    home: Home, words: TextTokenizer, *, world: int = 1, start: int = 0, stop: int | None = None, **options: Any
) -> list[GlobalBatch]:
    """All global batches of the steps [start, stop), from `world` ranks one after another."""
    streams = [stream(home, words, rank=rank, world=world, **options) for rank in range(world)]
    parts = [list(s.batches(start, stop)) for s in streams]
    assert len({len(p) for p in parts}) == 1
    return [joined(list(step)) for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_e1_e2_e3_the_sequence_is_the_same_on_any_ranks_and_workers(
    home: Home, publish: Callable[..., str], words: TextTokenizer, layout: str
) -> None:
    """The matrix of the issue: 1, 2, 4 ranks, 0, 1, 3 workers."""
    publish(LAYOUTS[layout])
    reference = run(home, words)
    assert len(reference) == 3 * (sum(LAYOUTS[layout]) // BATCH)
    for world in (1, 2, 4):
        for workers in (0, 1, 3):
            shutil.rmtree(Path(home.url) / "cache/tokens")  # filled by these threads, too
            assert run(home, words, world=world, workers=workers) == reference, (world, workers)


def test_the_cold_and_the_warm_cache_give_the_same_batches(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    folder = publish([90, 80, 87])
    cold = run(home, words, workers=2)
    shutil.rmtree(Path(folder) / "views/bad")
    for tar in (Path(folder) / "views/good").iterdir():
        tar.write_bytes(bytes(tar.stat().st_size))  # right size, nothing in it: only the cache can have served
    assert run(home, words, workers=2) == cold


@pytest.mark.parametrize("workers", [0, 3])
def test_e8_e9_e11_resume_at_any_step_and_beyond_any_epoch_gives_the_same_rest(
    home: Home, publish: Callable[..., str], words: TextTokenizer, workers: int
) -> None:
    publish([60, 37])
    whole = run(home, words)
    per_epoch = 97 // BATCH
    assert len(whole) == 3 * per_epoch
    for start in [*range(len(whole)), len(whole)]:
        assert run(home, words, start=start, workers=workers) == whole[start:]
    at_end = [per_epoch, 2 * per_epoch, 3 * per_epoch - 1]
    assert [whole[s][0] for s in at_end] == [1, 2, 2]  # the step after the last of an epoch begins the next one


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4), (2, 1)])
def test_e15_e16_resume_on_other_ranks_from_the_one_cursor_repeats_and_omits_nothing(
    home: Home, publish: Callable[..., str], words: TextTokenizer, before: int, after: int
) -> None:
    publish([60, 37])
    whole = run(home, words)
    for stop in (1, 5, 6, 7, 13):
        first = run(home, words, world=before, stop=stop, workers=1)
        resumed = stream(home, words)
        start = resumed.plan.resume(stream(home, words, world=before).plan.cursor(stop))
        assert first + run(home, words, world=after, start=start, workers=1) == whole


def test_e15_a_cursor_of_another_plan_is_refused(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([60, 37])
    cursor = stream(home, words).plan.cursor(4)
    with pytest.raises(ConflictError, match="means other samples"):
        stream(home, words, batch_global=8).plan.resume(cursor)
    publish([60, 38])
    with pytest.raises(ConflictError, match="means other samples"):
        stream(home, words).plan.resume(cursor)


def test_e5_e6_an_epoch_over_all_ranks_is_each_scene_once(
    home: Home, publish: Callable[..., str], words: TextTokenizer, make_scenes: Callable[..., Any]
) -> None:
    rows = {0: make_scenes(60, prefix="a"), 1: make_scenes(37, prefix="b")}
    publish(rows)
    keys = hash_keys([key for shard in rows.values() for key, _ in shard]).tolist()
    batches = run(home, words, world=4, workers=1)
    for epoch in range(3):
        seen = [h for e, hashes, _, _ in batches if e == epoch for h in hashes]
        assert len(set(seen)) == len(seen) == 96
        assert set(seen) < set(keys)


def test_e20_the_length_is_the_number_of_batches(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([60, 37])
    for options in ({"epochs": 3}, {"epochs": None, "samples": 150}):
        for workers in (0, 2):
            of_rank = stream(home, words, rank=1, world=2, workers=workers, **options)
            assert len(list(of_rank.batches())) == len(of_rank)
    with pytest.raises(ConfigError, match="of a run of 9 steps"):
        list(stream(home, words, epochs=None, samples=150).batches(0, 10))


def test_e24_a_restart_does_not_show_the_first_shards_again(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([40] * 6)
    whole = run(home, words, epochs=1)
    stopped = 5
    seen = {h for _, hashes, _, _ in whole[:stopped] for h in hashes}
    resumed = [h for _, hashes, _, _ in run(home, words, epochs=1, start=stopped) for h in hashes]
    assert not seen & set(resumed)
    assert len(seen) + len(resumed) == 240


def test_e14_the_ledger_counts_samples_and_adds_up_over_any_ranks(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    """Packing or grouping on the way to the encoder cannot change what was read: counts are of samples."""
    publish([60, 37])
    rolling: list[list[int]] = []
    for world in (1, 2, 4):
        streams = [stream(home, words, rank=rank, world=world) for rank in range(world)]
        value, values = 0, []
        for step in range(len(streams[0])):
            parts = [s.batch(step) for s in streams]
            assert sum(len(p.scene_hashes) for p in parts) == BATCH
            digest = sum(records.batch_digest(p.scene_hashes, p.places) for p in parts) & records.MASK
            value = records.roll(value, digest)
            values.append(value)
        rolling.append(values)
    assert rolling[0] == rolling[1] == rolling[2]
    alone, value = stream(home, words, rank=1, world=4), 0
    for step in range(len(alone)):  # one rank can say what all of them must have read
        value = records.roll(value, records.batch_digest(alone.global_scene_hashes(step), np.arange(BATCH)))
    assert value == rolling[0][-1]


def test_bad_views_of_the_good_tars_are_the_samples_of_the_bad_tars(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    """Three passes, so five epochs go round; scenes with one or two captions repeat them."""
    publish([60, 37])
    for views in (ViewsConfig(), whole_captions(1, max_tokens=64)):
        options: dict[str, Any] = {"epochs": 5, "good_fraction": 0.0, "views": views}
        good = run(home, words, **options)
        bad = run(home, words, kind="bad", world=2, workers=1, **options)
        assert good == bad
        assert len(good) == 30


def test_bad_views_are_the_bad_tars_of_the_real_shard_writer_too(
    home: Home, publish_toyworld: Callable[[int], None]
) -> None:
    """With pictures in the good tars, defects, and the writer's own passes."""
    publish_toyworld(90)
    words = wordpiece.corpus(open_shards(home, "tiny", "v1", "train"), home, vocab_size=400)
    options: dict[str, Any] = {"epochs": 6, "good_fraction": 0.0, "views": whole_captions(1, max_tokens=64)}
    good = run(home, words, **options)
    bad = run(home, words, kind="bad", **options)
    assert good == bad
    assert len({tuple(v) for _, _, views, _ in good for v in views}) > 200


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fraction_of_point_3_gives_point_3_of_the_good_and_the_rest_of_the_bad_run(
    home: Home, publish: Callable[..., str], words: TextTokenizer, workers: int
) -> None:
    publish([700, 500])
    good, bad, mixed = (
        list(stream(home, words, good_fraction=f, epochs=1, workers=workers).batches()) for f in (1.0, 0.0, 0.3)
    )
    is_good: NDArray[np.bool_] = np.concatenate([b.is_good for b in mixed])
    assert abs(is_good.mean() - 0.3) < 0.04  # 3 standard deviations of 1,200 draws
    for g, b, m in zip(good, bad, mixed, strict=True):
        assert g.scene_hashes.tolist() == b.scene_hashes.tolist() == m.scene_hashes.tolist()
        for row in range(len(m.views)):
            expected = g if m.is_good[row % BATCH] else b
            assert m.views.row(row).tolist() == expected.views.row(row).tolist()


def test_roles_and_exclusions_hold_in_every_view(
    home: Home, publish: Callable[..., str], words: TextTokenizer, make_scenes: Callable[..., Any], tmp_path: Path
) -> None:
    rows = {0: make_scenes(80, prefix="a"), 1: make_scenes(60, prefix="b")}
    publish(rows)
    listed = tmp_path / "leave-out.txt"
    listed.write_text("a00001\nb00002\n")
    allowed: dict[int, list[list[int]]] = {}
    for key, captions in (scene for shard in rows.values() for scene in shard):
        texts = [text for _, role, text in captions if role == "human"]
        if texts and key not in ("a00001", "b00002"):
            allowed[int(hash_keys([key])[0])] = [words.encode([text]).tokens.tolist() for text in texts]
    special = words.special
    for fraction in (1.0, 0.0):
        options: dict[str, Any] = {"roles": ("human",), "exclude": str(listed), "good_fraction": fraction}
        batches = run(home, words, views=whole_captions(1, max_tokens=64), epochs=2, world=2, workers=1, **options)
        assert len(batches) == 2 * (len(allowed) // BATCH)
        for _, hashes, views, _ in batches:
            assert all(
                v[1:-1] in allowed[h] and (v[0], v[-1]) == (special.cls, special.sep)
                for h, v in zip(hashes, views, strict=True)
            )


def test_a_tar_that_does_not_hold_what_the_plan_counted_is_refused(
    home: Home, publish: Callable[..., str], words: TextTokenizer, make_scenes: Callable[..., Any]
) -> None:
    publish({0: make_scenes(40)})
    of_first = stream(home, words, roles=("human",))
    publish({0: make_scenes(40, seed=5)})  # same shard and size under the same version: never published by ingest
    shards = open_shards(home, "tiny", "v1", "train")
    with pytest.raises(IntegrityError, match="the plan counted"):
        list(Stream(of_first.plan, TokenCache(shards, words, home), ViewsConfig()).batches())


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_in_a_worker_reaches_the_caller_and_ends_the_threads(
    home: Home, publish: Callable[..., str], words: TextTokenizer, workers: int
) -> None:
    folder = publish([60, 60, 60])
    tar = Path(folder) / schema.good_path("train", 1)
    data = bytearray(tar.read_bytes())
    data[1_000] ^= 1
    tar.write_bytes(data)
    threads = threading.active_count()
    with pytest.raises(IntegrityError, match="train-00001"):
        list(stream(home, words, workers=workers).batches())
    assert threading.active_count() == threads


def test_a_consumer_that_stops_early_leaves_no_thread(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([60, 60, 60])
    threads = threading.active_count()
    batches = stream(home, words, workers=3).batches()
    next(batches)
    assert threading.active_count() > threads
    batches.close()
    assert threading.active_count() == threads


def test_reading_ahead_is_bounded(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([40] * 30)
    slow = stream(home, words, workers=2, lanes=2, window=8)
    batches = slow.batches()
    for _ in range(3):
        next(batches)
    deadline = threading.Event()
    deadline.wait(1.0)
    filled = len(storage.list_files(str(Path(home.url) / "cache/tokens")))
    assert filled <= 2 * 3 + 2 + 2 + 4  # two lanes' current shards and their next, the limit, the workers' own
    batches.close()


def test_ranks_that_do_not_divide_the_lanes_and_foreign_caches_are_refused(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([60])
    with pytest.raises(ConfigError, match="3 ranks do not divide"):
        stream(home, words, world=3)
    with pytest.raises(ConfigError, match="workers"):
        stream(home, words, workers=-1)
    plan = stream(home, words).plan
    publish([61])
    with pytest.raises(ConfigError, match="Make both from the same shards"):
        Stream(plan, TokenCache(open_shards(home, "tiny", "v1", "train"), words, home), ViewsConfig())


KILLED = """
import sys
import tokenizers
from infra.home import Home
from trainer.data.cache import TokenCache
from trainer.data.plan import PlanConfig, make_plan
from trainer.data.shardset import open_shards
from trainer.data.stream import Stream
from trainer.data.tokenizer import from_backend
from trainer.data.views import ViewsConfig
words = from_backend(tokenizers.Tokenizer.from_file(sys.argv[2]), name="words")
home = Home(url=sys.argv[1], catalog="x")
shards = open_shards(home, "tiny", "v1", "train")
plan = make_plan(PlanConfig(batch_global=16, epochs=3, window=20), shards, home)
for batch in Stream(plan, TokenCache(shards, words, home), ViewsConfig(), workers=3).batches():
    print(batch.step, flush=True)
"""


def test_e18_a_killed_rank_with_workers_leaves_nothing_behind_and_the_restart_is_identical(
    home: Home, publish: Callable[..., str], words: TextTokenizer, tmp_path: Path
) -> None:
    publish([120] * 6)
    file = tmp_path / "words.json"
    file.write_bytes(words.to_json())
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", KILLED, home.url, str(file)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    stop = random.Random(0).randint(3, 9)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == stop:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    resumed = run(home, words, start=last + 1, workers=3)
    shutil.rmtree(Path(home.url) / "cache")
    assert resumed == run(home, words)[last + 1 :]
    assert set(os.listdir("/dev/shm")) <= shared
