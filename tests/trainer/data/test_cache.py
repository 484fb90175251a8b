"""A shard is tokenised once, whoever asks, and a token file is whole, of its key, or refused."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer
from catalog import schema
from infra import seeds, storage
from infra.errors import IntegrityError
from infra.home import Home
from trainer.data import arrayfile
from trainer.data.cache import TokenCache, TokenShard
from trainer.data.shardset import open_shards
from trainer.data.tokenizer import TextTokenizer

REPOSITORY = Path(trainer.__file__).parents[1]


def content(shard: TokenShard) -> list[tuple[str, list[tuple[int, str, list[int]]]]]:
    """(key, [(caption index, role, ids)]) of each scene."""
    c = shard.captions
    scenes = []
    for i, (start, stop) in enumerate(itertools.pairwise(shard.key_offsets.tolist())):
        numbers = range(c.scene_offsets[i], c.scene_offsets[i + 1])
        ids = [c.tokens[c.caption_offsets[n] : c.caption_offsets[n + 1]].tolist() for n in numbers]
        roles = [schema.ROLES[c.roles[n]] for n in numbers]
        key = shard.keys[start:stop].tobytes().decode()
        scenes.append((key, list(zip(c.caption_index[numbers].tolist(), roles, ids, strict=True))))
    return scenes


def test_a_shard_holds_the_tokens_roles_and_keys_of_its_captions(
    home: Home, publish: Callable[..., str], make_scenes: Callable[..., Any], words: TextTokenizer
) -> None:
    rows = make_scenes(60)
    publish({4: rows})
    shard = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home).open(0)
    expected = [
        (key, [(n, role, words.encode([text]).tokens.tolist()) for n, role, text in captions]) for key, captions in rows
    ]
    assert content(shard) == expected
    assert shard.captions.scene_hashes.tolist() == seeds.hash_keys([key for key, _ in rows]).tolist()
    assert shard.captions.tokens.dtype == np.uint16
    assert not shard.captions.tokens.flags.writeable


def test_a_bad_pass_is_cached_beside_the_good_tar(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([30])
    cache = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home)
    good = dict(content(cache.open(0)))
    for bad_pass in range(3):
        bad = content(cache.open(0, bad_pass))
        assert [key for key, _ in bad] == list(good)
        assert all(len(captions) == 1 and captions[0] in good[key] for key, captions in bad)
    assert len(storage.list_files(cache.url)) == 4


def test_the_second_reader_needs_no_tar(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    folder = publish([30, 20])
    shards = open_shards(home, "tiny", "v1", "train")
    first = [content(TokenCache(shards, words, home).open(i)) for i in range(2)]
    shutil.rmtree(Path(folder) / "views")
    cache = TokenCache(shards, words, home)
    assert [content(cache.open(i)) for i in range(2)] == first
    assert storage.exists(cache.path(1))
    assert not storage.exists(cache.path(0, bad_pass=1))


def test_the_bytes_do_not_depend_on_who_fills(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([40])
    shards = open_shards(home, "tiny", "v1", "train")
    cache = TokenCache(shards, words, home)
    cache.open(0)
    first = Path(cache.path(0)).read_bytes()
    shutil.rmtree(cache.url)
    TokenCache(shards, words, home).open(0)
    assert Path(cache.path(0)).read_bytes() == first


def test_many_threads_that_ask_for_one_shard_get_the_one_that_the_first_made(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([200])
    cache = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home)
    with ThreadPoolExecutor(8) as pool:
        shards = list(pool.map(lambda _: cache.open(0), range(16)))
    assert {id(shard) for shard in shards} == {id(shards[0])}


def test_another_tokenizer_has_a_cache_of_its_own(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    from trainer.data import wordpiece

    publish([30])
    shards = open_shards(home, "tiny", "v1", "train")
    other = TokenCache(shards, wordpiece.corpus(shards, home, vocab_size=120), home)
    cache = TokenCache(shards, words, home)
    assert content(cache.open(0)) != content(other.open(0))
    assert len(storage.list_files(storage.join(home.url, "cache", "tokens"))) == 2


def test_a_cut_off_or_foreign_token_file_is_refused(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([30, 30])
    shards = open_shards(home, "tiny", "v1", "train")
    cache = TokenCache(shards, words, home)
    cache.open(0)
    cache.open(1)
    path, other = Path(cache.path(0)), Path(cache.path(1))
    data = path.read_bytes()
    for broken, sentence in (
        (data[:-100], "its header says"),
        (data[:10], "not an array file"),
        (b"", "not an array file"),
        (b"x" * 500, "not an array file"),
        (data[:40] + b"{" + data[41:], "broken header"),
        (data[:-500] + bytes([data[-500] ^ 1]) + data[-499:], "not those that were written"),
        (other.read_bytes(), r"is of shard 1, not of 0"),
    ):
        path.write_bytes(broken)
        with pytest.raises(IntegrityError, match=sentence):
            TokenCache(shards, words, home).open(0)
    path.unlink()
    assert len(TokenCache(shards, words, home).open(0).captions) == 30  # made again


def test_a_tar_changed_after_the_plan_is_not_cached(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    folder = publish([30])
    shards = open_shards(home, "tiny", "v1", "train")
    tar = Path(folder) / schema.good_path("train", 0)
    data = bytearray(tar.read_bytes())
    data[data.index(b'"text":"') + 8] = ord("Q")
    tar.write_bytes(data)
    cache = TokenCache(shards, words, home)
    with pytest.raises(IntegrityError, match="sha256"):
        cache.open(0)
    assert not storage.exists(cache.path(0))
    with pytest.raises(IntegrityError, match="sha256"):
        cache.open(0)  # the failure is not remembered as a result


def test_a_manifest_of_another_job_is_refused(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([30])
    shards = open_shards(home, "tiny", "v1", "train")
    publish([31])
    with pytest.raises(IntegrityError, match="changed since the plan was made"):
        TokenCache(shards, words, home).open(0)


def test_a_cache_on_an_object_store_is_read_whole(
    publish: Callable[..., str], home: Home, words: TextTokenizer
) -> None:
    publish([30])
    local = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home)
    url = "memory://bucket-cache/home"
    for name in storage.list_files(home.datasets()):
        storage.publish(f"{url}/datasets/{name}", storage.read_bytes(home.datasets(name)))
    far = Home(url=url, catalog="postgres:x")
    remote = TokenCache(open_shards(far, "tiny", "v1", "train"), words, far)
    assert content(remote.open(0)) == content(local.open(0))
    assert remote.path(0).startswith("memory://")
    again = TokenCache(open_shards(far, "tiny", "v1", "train"), words, far)
    assert content(again.open(0)) == content(local.open(0))
    counts = again.token_counts(0)
    assert counts is not None
    assert counts[0].sum() == len(local.open(0).captions.tokens)


def test_only_so_many_shards_stay_open(home: Home, publish: Callable[..., str], words: TextTokenizer) -> None:
    publish([3] * 12)
    cache = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home)
    cache._capacity = 2
    cache.reserve(4)
    kept = [cache.open(i) for i in range(12)]
    assert len(cache._open) <= 5
    assert [len(shard.captions) for shard in kept] == [3] * 12  # those in use stay readable
    assert cache.open(11) is kept[11]
    assert cache.open(0) is not kept[0]


KILLED = """
import sys
from infra.home import Home
from trainer.data.cache import TokenCache
from trainer.data.shardset import open_shards
from trainer.data.tokenizer import from_backend
import tokenizers
words = from_backend(tokenizers.Tokenizer.from_file(sys.argv[2]), name="words")
home = Home(url=sys.argv[1], catalog="x")
shards = open_shards(home, "tiny", "v1", "train")
cache = TokenCache(shards, words, home)
print("ready", flush=True)
for i in range(len(shards.numbers)):
    cache.open(i)
print("done", flush=True)
"""


def test_e18_a_killed_filler_leaves_nothing_that_stops_the_next_one(
    home: Home, publish: Callable[..., str], words: TextTokenizer, tmp_path: Path
) -> None:
    publish([150] * 8)
    shards = open_shards(home, "tiny", "v1", "train")
    file = tmp_path / "words.json"
    file.write_bytes(words.to_json())
    memory = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", KILLED, home.url, str(file)]
    cache = TokenCache(shards, words, home)
    for wait_s in (0.0, 0.01, 0.03):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(wait_s)
            process.send_signal(signal.SIGKILL)
    filled = [content(TokenCache(shards, words, home).open(i)) for i in range(8)]
    shutil.rmtree(cache.url)
    assert [content(cache.open(i)) for i in range(8)] == filled
    assert set(os.listdir("/dev/shm")) <= memory


def test_e18_temporary_files_of_killed_processes_are_swept_when_they_are_old(
    home: Home, publish: Callable[..., str], words: TextTokenizer
) -> None:
    publish([20])
    cache = TokenCache(open_shards(home, "tiny", "v1", "train"), words, home)
    folder = Path(cache.path(0)).parent
    folder.mkdir(parents=True)
    old, young = (folder / f".train-00000.tokens.{i}-ab{storage.TEMPORARY_SUFFIX}" for i in (1, 2))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7_200,) * 2)
    cache.open(0)
    assert not old.exists()
    assert young.exists()  # its writer may be alive


arrays = st.lists(st.integers(0, 2**15), max_size=30)


@given(
    st.dictionaries(st.text("abc", min_size=1), arrays, max_size=4),
    st.sampled_from(["<u2", "<i4", "<i8", "<u8", "|i1"]),
)
def test_packed_arrays_come_back_with_type_and_length(values: dict[str, list[int]], dtype: str) -> None:
    packed = {name: np.array(numbers, np.int64).astype(dtype) for name, numbers in values.items()}
    data = b"".join(bytes(part) for part in arrayfile.pack({"n": 1}, packed))
    facts, found = arrayfile.unpack(data, url="x")
    assert facts == {"n": 1} == arrayfile.facts_of(data, url="x")
    assert {name: a.tolist() for name, a in found.items()} == {name: a.tolist() for name, a in packed.items()}
    assert all(a.dtype == np.dtype(dtype) for a in found.values())
    with pytest.raises(IntegrityError):
        arrayfile.unpack(data + b"x", url="x")
