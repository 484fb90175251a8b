from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from infra.errors import GoodviewsError, InputError
from pipelines.arrays import is_none
from pipelines.ingest import tables
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.group import group, merge
from pipelines.records import Input
from pipelines.sources.formats.tar_members import open_tar
from pipelines.sources.formats.tar_samples import Sample, nothing, samples, split_name
from pipelines.sources.tars.webdataset_tars import WebdatasetTars
from tests.pipelines.sources.tar_files import picture, tar_of, write_tar

# Stock webdataset leaves closing its file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")


def read(path: Path, **options: Any) -> list[Sample]:
    source = Input(uri=path.name, url=str(path))
    with open_tar(source) as file:
        return list(samples(file, source, wants=options.pop("wants", lambda *_: True), **options))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Track 2.0.mp3", ("Track 2", "0.mp3")),
        ("22.05", ("22", "05")),
        ("/p/22.0/1.1.png", ("/p/22.0/1", "1.png")),
        ("train.v1/0001.jpg", ("train.v1/0001", "jpg")),
        ("train.v1/0002.SEG.PNG", ("train.v1/0002", "seg.png")),
        ("a/b", None),
        ("a.v1/b", None),
        (".hidden", None),
        ("d/._0001.jpg", None),
        ("__meta__/0001.json", None),
    ],
)
def test_b1_b2_b3_the_rule_of_names(name: str, split: tuple[str, str] | None) -> None:
    assert split_name(name) == split


@given(st.text("ab_-.0/A ", min_size=1, max_size=12))
def test_b2_names_are_split_as_webdataset_splits_them(name: str) -> None:
    key, suffix = base_plus_ext(name)
    is_hidden = name.rpartition("/")[2].startswith(".")
    if not is_hidden and key is not None and not re.match(r"__[^/]*__($|/)", name):
        assert split_name(name) == (key, suffix.lower())
    elif not is_hidden:
        assert split_name(name) is None


KEYS = st.lists(st.from_regex(r"(?:[a-c]{1,2}(?:\.v1)?/)?[a-z0-9]{1,4}", fullmatch=True), max_size=6, unique=True)
SUFFIXES = st.lists(st.sampled_from(["jpg", "json", "txt", "0.txt", "Seg.PNG", "cls"]), min_size=1, unique=True)


@settings(max_examples=40)
@given(keys=KEYS, suffixes=SUFFIXES)
def test_webdataset_reads_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], suffixes: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "same.tar"
    write_tar(path, [(f"{key}.{suffix}", f"{key} {suffix}".encode()) for key in keys for suffix in suffixes])
    theirs = [
        (sample["__key__"], {name: data for name, data in sample.items() if not name.startswith("__")})
        for sample in wds.WebDataset(str(path), shardshuffle=False, empty_check=False)
    ]
    assert theirs == [(sample.key, dict(sample.data)) for sample in read(path)]


def test_b8_a_sample_in_two_places_is_refused_with_key_and_tar(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.jpg", b""), ("1.jpg", b""), ("0.txt", b"a"), ("1.txt", b"b")])
    with pytest.raises(InputError, match=r"sample '0' of a\.tar is in two places, at bytes 0 and 1,024 .*'0\.txt'"):
        read(path)


@pytest.mark.parametrize("again", ["a.jpg", "a.JPG"])
def test_b5_a_member_that_comes_twice_is_refused_with_key_and_tar(tmp_path: Path, again: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b""), (again, b"")])
    with pytest.raises(InputError, match=rf"sample 'a' of a\.tar has its member '{again}' twice"):
        read(path)


def test_b5_one_key_in_two_tars_is_two_samples(tmp_path: Path, read_whole: Any) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", [("k.txt", b"text %d" % n)]) for n in (1, 2)]
    assert read_whole(WebdatasetTars(), *paths).ids == ["1.tar#k", "2.tar#k"]
    # Named by key alone, they are one scene.
    assert read_whole(WebdatasetTars(id="__key__"), *paths).ids == ["k", "k"]


def test_only_wanted_payloads_are_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.pkl", b"y"), ("b.pkl", b"z")])
    assert [dict(s.data) for s in read(path, wants=nothing)] == [{}, {}]
    assert [dict(s.data) for s in read(path, wants=lambda key, suffix, size: suffix == "jpg")] == [{"jpg": b"x"}, {}]


def test_a_name_outside_utf8_is_written_as_a_url_would(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([("caf#.txt", b"a")]))
    data = bytearray(path.read_bytes())
    data[3], data[148:156] = 0x92, b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]) - ord("#") + 0x92)
    path.write_bytes(data)
    assert [sample.key for sample in read(path)] == ["caf%92"]


FUZZED = tar_of(
    [
        ("d.v1/0.jpg", picture(1)),
        ("d.v1/0.json", b'{"caption": "a cat", "sha256": "%s"}' % (b"ab" * 32)),
        ("d.v1/1.json", b'{"captions": ["a dog", "one dog", null], "url": "http://a.example/1"}'),
        ("d.v1/1.png", picture(2, "PNG")),
        ("2.0.txt", b"a boat"),
        ("2.1.txt", b"a caf\x92"),
        ("3.txt", b"nan"),
        ("3.webp", picture(3, "WEBP")),
    ]
)
EDITS = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, len(FUZZED) - 1), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, len(FUZZED) - 1), st.integers(0, 0)),
    st.tuples(st.just("drop"), st.integers(0, len(FUZZED) - 1), st.integers(1, 1_024)),
    st.tuples(st.just("insert"), st.integers(0, len(FUZZED) - 1), st.integers(1, 1_024)),
    st.tuples(st.just("again"), st.integers(0, len(FUZZED) // 512), st.integers(1, 4)),
    st.tuples(st.just("header"), st.integers(0, len(FUZZED) // 512 - 1), st.integers(0, 511 * 256)),
)


def edited(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    """The bytes after the edits; `header` changes one byte of a block and mends its checksum, so that it is believed."""
    out = bytearray(data)
    for what, at, amount in edits:
        if what == "flip" and at < len(out):
            out[at] ^= amount
        elif what == "cut":
            del out[at:]
        elif what == "drop":
            del out[at : at + amount]
        elif what == "insert":
            out[at:at] = bytes(amount) if at % 2 else b"\xff" * amount
        elif what == "again":
            out[at * 512 : at * 512] = out[at * 512 : (at + amount) * 512]
        elif what == "header" and len(out) >= (at + 1) * 512:
            block = out[at * 512 : (at + 1) * 512]
            block[amount // 256] = amount % 256
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            out[at * 512 : (at + 1) * 512] = block
    return bytes(out)


@settings(max_examples=150)
@given(edits=st.lists(EDITS, min_size=1, max_size=3))
def test_a_mutated_tar_is_a_sentence_or_every_text_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.tar"
    path.write_bytes(edited(FUZZED, edits))
    source = WebdatasetTars()
    try:
        survey = source.survey([Input(uri="fuzzed.tar", url=str(path))], None)
        batch = merge(part for piece in survey.pieces for part in source.read(piece))
    except GoodviewsError as error:
        assert "fuzzed.tar" in str(error)
        return
    scenes = group(batch, config=CleanConfig(), repair=False)
    kept = tables.keep(scenes)
    origin = tables.Origin(dataset="fuzzed", version="0", split="train", shard=0)
    rejects = tables.rejects_table(scenes, origin)
    captions = tables.scenes_table(scenes, kept, origin)["captions"].combine_chunks()
    assert batch.texts.num_rows == len(captions.values) + rejects.num_rows
    assert rejects.num_rows == int((~is_none(scenes.reason)).sum())


def test_the_fuzzed_tar_is_whole_before_it_is_edited(tmp_path: Path, read_whole: Any) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(FUZZED)
    whole = read_whole(WebdatasetTars(), path)
    assert len(whole.records) == 4 and len(whole.texts) == 7
    assert sum(record["image"] is not None for record in whole.records) == 3
    assert edited(FUZZED, [("header", 0, 511 * 256)]) == FUZZED and io.BytesIO(FUZZED).read(1) == b"d"
