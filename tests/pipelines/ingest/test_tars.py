"""Tars laid out by Arrow are ordinary tars with fixed bytes."""

import io
import tarfile

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import IntegrityError
from pipelines.ingest import tars


def whole(tar: tars.Tar) -> bytes:
    return b"".join(bytes(part) for part in tar.parts)


def strings(values: list[str]) -> pa.LargeStringArray:
    return pa.array(values, pa.large_string())


@given(st.lists(st.binary(max_size=1500), max_size=12))
def test_tarfile_reads_back_every_member(payloads: list[bytes]) -> None:
    names = [f"k{i:03d}.json" for i in range(len(payloads))]
    tar = tars.tar(strings(names), pa.array(payloads, pa.large_binary()))
    data = whole(tar)
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        members = file.getmembers()
        assert [m.name for m in members] == names
        assert [file.extractfile(m).read() for m in members] == payloads  # type: ignore[union-attr]
        assert {(m.mode, m.uid, m.gid, m.mtime, m.uname) for m in members} <= {(0o444, 0, 0, 0, "")}
    assert len(data) % 10_240 == 0
    assert np.cumsum(tar.blocks).tolist() == [(m.offset_data + -(-m.size // 512) * 512) // 512 for m in members]


def test_the_header_is_what_tarfile_writes() -> None:
    info = tarfile.TarInfo("a-c000.json")
    info.size, info.mode, info.mtime = 3, 0o444, 0
    expected = info.tobuf(tarfile.USTAR_FORMAT)
    ours = whole(tars.tar(strings(["a-c000.json"]), pa.array([b"abc"], pa.large_binary())))[:512]
    # Device numbers are the one difference: tarfile writes zeros in octal, we leave them NUL; both mean 0.
    device = slice(329, 345)
    checksum = slice(148, 156)
    blank = bytearray(expected)
    blank[device] = bytes(16)
    blank[checksum] = ours[checksum]
    assert ours == bytes(blank)


def test_b11_a_name_over_100_bytes_is_refused() -> None:
    with pytest.raises(IntegrityError, match="100 bytes"):
        tars.tar(strings(["k" * 97 + ".json"]), pa.array([b""], pa.large_binary()))


def test_b8_pictures_stand_beside_their_json_in_suffix_order() -> None:
    keys = strings(["a", "b", "c"])
    names, payloads, samples = tars.with_images(
        tars.joined(keys, ".json"),
        pa.array([b"A", b"B", b"C"], pa.large_binary()),
        keys,
        np.array([0, 2, 2]),
        strings([".jpg", ".f000.jpg", ".f001.jpg"]),
        pa.array([b"1", b"2", b"3"], pa.large_binary()),
    )
    assert names.to_pylist() == ["a.jpg", "a.json", "b.json", "c.f000.jpg", "c.f001.jpg", "c.json"]
    assert payloads.to_pylist() == [b"1", b"A", b"B", b"2", b"3", b"C"]
    assert tars.tar(names, payloads, samples).blocks.tolist() == [4, 2, 6]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20), min_size=1, max_size=8))
def test_sample_json_is_json_for_any_cleaned_text(texts: list[str]) -> None:
    n = len(texts)
    captions = tars.caption_json(np.arange(n), strings(["human"] * n), strings(texts))
    offsets = np.array([0, 1, n])
    data = tars.sample_json("d", strings(["a", "b"]), tars.joined_by_scene(captions, offsets)).to_pylist()
    samples = [orjson.loads(d) for d in data]
    assert [s["scene_key"] for s in samples] == ["a", "b"]
    found = [(c["index"], c["role"], c["text"]) for s in samples for c in s["captions"]]
    assert found == [(i, "human", text) for i, text in enumerate(texts)]


def test_an_empty_tar_is_a_tar() -> None:
    tar = tars.tar(strings([]), pa.array([], pa.large_binary()))
    with tarfile.open(fileobj=io.BytesIO(whole(tar))) as file:
        assert file.getmembers() == []
    assert tar.blocks.tolist() == []
