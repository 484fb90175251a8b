"""A view tar is read as its manifest describes it, or refused with a sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import webdataset as wds

from catalog import schema
from catalog.manifest import Manifest, ShardFile
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home
from pipelines.ingest import tars
from trainer.data.reader import SceneTexts, ViewTar, read_tar, view_tar
from trainer.data.shardset import open_shards


def rows_of(parts: list[SceneTexts]) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Back to (key, [(index, role, text)]), scene by scene."""
    rows = []
    for part in parts:
        texts = part.texts.to_pylist()
        for i, key in enumerate(part.keys):
            numbers = range(part.scene_offsets[i], part.scene_offsets[i + 1])
            rows.append((key, [(int(part.caption_index[c]), schema.ROLES[part.roles[c]], texts[c]) for c in numbers]))
    return rows


def first_tar(folder: str, bad_pass: int | None = None) -> ViewTar:
    url = storage.join(folder, schema.manifest_path("train", 0))
    return view_tar(folder, Manifest.from_json(storage.read_bytes(url), url=url), bad_pass=bad_pass)


def write(folder: Path, samples: list[tuple[str, Any]], **changes: Any) -> ViewTar:
    """A good tar of (member name, JSON value or bytes), and its line of a manifest."""
    payloads = [value if isinstance(value, bytes) else json.dumps(value).encode() for _, value in samples]
    tar = tars.tar(pa.array([name for name, _ in samples], pa.large_string()), pa.array(payloads, pa.large_binary()))
    data = b"".join(bytes(part) for part in tar.parts)
    (folder / "x.tar").write_bytes(data)
    values = {
        "path": "x.tar",
        "kind": "good",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "rows": len(samples),
        "blocks": tar.blocks.tolist(),
    }
    return ViewTar(
        url=str(folder / "x.tar"), dataset="tiny", name="train-00000 of tiny@v1", file=ShardFile(**(values | changes))
    )


def sample(key: str, text: str = "a dog", **changes: Any) -> dict[str, Any]:
    return {"dataset": "tiny", "scene_key": key, "captions": [{"index": 0, "role": "human", "text": text}]} | changes


@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO")  # webdataset leaves the tar open
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("piece_bytes", [1, 5_000, 16 << 20])
def test_what_is_read_is_what_stock_webdataset_reads(
    publish: Callable[..., str], make_scenes: Callable[..., Any], piece_bytes: int
) -> None:
    rows = make_scenes(50)
    folder = publish({0: rows})
    assert rows_of(list(read_tar(first_tar(folder), piece_bytes=piece_bytes))) == rows
    stock = wds.WebDataset(first_tar(folder).url, shardshuffle=False, empty_check=False).decode()
    assert [(s["__key__"], [(c["index"], c["role"], c["text"]) for c in s["json"]["captions"]]) for s in stock] == rows


def test_a_bad_pass_shows_each_scene_once_with_one_caption(
    publish: Callable[..., str], make_scenes: Callable[..., Any]
) -> None:
    rows = dict(make_scenes(50))
    folder = publish({0: list(rows.items())})
    shown = [rows_of(list(read_tar(first_tar(folder, bad_pass=p)))) for p in range(3)]
    for one in shown:
        assert [key for key, _ in one] == list(rows)
        assert all(len(captions) == 1 and captions[0] in rows[key] for key, captions in one)
    three = [i for i, captions in enumerate(rows.values()) if len(captions) >= 3]
    assert len(three) > 10
    assert all(len({one[i][1][0] for one in shown}) == 3 for i in three)


def test_texts_of_any_alphabet_come_back_unchanged(tmp_path: Path) -> None:
    texts = ['quoted "dog" \\ back', "caf\u00e9 \U0001f415 \u72ac", "line \u2028 separator", "x" * 3_000_000]
    tar = write(tmp_path, [(f"k{i}.json", sample(f"k{i}", text)) for i, text in enumerate(texts)])
    assert [row[1][0][2] for row in rows_of(list(read_tar(tar)))] == texts


def test_pictures_in_the_tar_are_stepped_over(tmp_path: Path) -> None:
    keys = pa.array(["a", "b", "c"], pa.large_string())
    payloads = pa.array([json.dumps(sample(k)).encode() for k in "abc"], pa.large_binary())
    pictures = pa.array([bytes(700), bytes(10), bytes(1600)], pa.large_binary())
    suffixes = pa.array([".jpg", ".f000.jpg", ".f001.jpg"], pa.large_string())
    tar = tars.tar(
        *tars.with_images(tars.joined(keys, ".json"), payloads, keys, np.array([0, 2, 2]), suffixes, pictures)
    )
    data = b"".join(bytes(part) for part in tar.parts)
    (tmp_path / "x.tar").write_bytes(data)
    file = ShardFile(
        path="x.tar",
        kind="good",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        rows=3,
        blocks=tar.blocks.tolist(),
    )
    found = read_tar(ViewTar(url=str(tmp_path / "x.tar"), dataset="tiny", name="x", file=file), piece_bytes=2_000)
    assert [row[0] for row in rows_of(list(found))] == ["a", "b", "c"]


def test_remote_tars_are_read_by_range(make_scenes: Callable[..., Any], publish: Callable[..., str]) -> None:
    rows = make_scenes(40)
    local = first_tar(publish({0: rows}))
    url = "memory://bucket/tars/train-00000.tar"
    storage.publish(url, storage.read_bytes(local.url))
    remote = dataclasses.replace(local, url=url)
    assert rows_of(list(read_tar(remote, piece_bytes=3_000))) == rows
    storage.publish(url, storage.read_bytes(local.url)[:-20_000])
    with pytest.raises(IntegrityError, match="It was cut off or changed"):
        list(read_tar(remote, piece_bytes=3_000))


def test_b9_a_cut_off_or_changed_tar_is_refused(publish: Callable[..., str]) -> None:
    folder = publish([40])
    tar = first_tar(folder)
    data = bytearray(Path(tar.url).read_bytes())
    Path(tar.url).write_bytes(data[: len(data) * 9 // 10])
    with pytest.raises(IntegrityError, match=r"bytes, the manifest of shard train-00000 of tiny@v1 says .*cut off"):
        list(read_tar(tar))
    at = data.index(b'"text":"') + 8
    data[at] = ord("Q")
    Path(tar.url).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"sha256 .* changed after publication"):
        list(read_tar(tar))
    Path(tar.url).unlink()
    with pytest.raises(InputError, match="no such file"):
        list(read_tar(tar))


def test_b18_a_file_that_is_no_tar_is_refused(publish: Callable[..., str]) -> None:
    tar = first_tar(publish([40]))
    data = b"PAR1" * (tar.file.bytes // 4)
    Path(tar.url).write_bytes(data)
    changed = dataclasses.replace(tar, file=dataclasses.replace(tar.file, sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(IntegrityError, match="is no tar"):
        list(read_tar(changed))


def test_b14_a_null_or_missing_field_is_refused_and_not_inferred_away(tmp_path: Path) -> None:
    without: list[dict[str, Any]] = [
        sample("a", captions=None),
        sample("a", captions=[]),
        {"dataset": "tiny", "captions": sample("a")["captions"]},
        sample("a", captions=[{"index": None, "role": "human", "text": "x"}]),
        sample("a", captions=[{"index": 0, "role": "human", "text": None}]),
        sample("a", captions=[{"index": 0, "text": "x"}]),
    ]
    for broken in without:
        tar = write(tmp_path, [("a.json", broken), ("b.json", sample("b"))])
        with pytest.raises(IntegrityError, match="without scene key, captions|has no caption"):
            list(read_tar(tar))


def test_headers_keys_and_dataset_must_agree(tmp_path: Path) -> None:
    cases: list[tuple[list[tuple[str, Any]], str]] = [
        ([("a.json", sample("b"))], "the member 'a.json' holds the scene of 'b.json'"),
        ([("a.txt", sample("a"))], "does not end with its JSON"),
        ([("a.json", sample("a", dataset="other"))], "samples of the dataset"),
        ([("a.json", sample("a", captions=[{"index": 0, "role": "poem", "text": "x"}]))], "role 'poem'"),
        ([("a.json", b'{"dataset":"tiny",\n"scene_key"')], "not the JSON of a scene"),
        ([("a.json", b"[1, 2, 3, 4, 5, 6]")], "not the JSON of a scene"),
        ([("a.json", sample("a")), ("b.json", b"{}")], "2 bytes of JSON"),
        ([("a.json", b"")], "0 bytes of JSON"),
        ([("a.json", json.dumps(sample("a")).encode() * 2)], "2 JSON texts in 1 members"),
    ]
    for samples, sentence in cases:
        with pytest.raises(IntegrityError, match=sentence):
            list(read_tar(write(tmp_path, samples)))


def test_blocks_that_do_not_fit_the_tar_are_refused(tmp_path: Path) -> None:
    samples = [("a.json", sample("a")), ("b.json", sample("b"))]
    for blocks, sentence in (
        ([2, 3], "end at byte|does not end with its JSON"),
        ([4], "length of each sample"),
        ([3, 1], "tar header"),
    ):
        with pytest.raises(IntegrityError, match=sentence):
            list(read_tar(write(tmp_path, samples, blocks=blocks)))
    with pytest.raises(IntegrityError, match="length of each sample"):
        list(read_tar(write(tmp_path, samples, blocks=None)))


def test_a_shard_without_that_kind_of_tar_is_refused(home: Home, publish: Callable[..., str]) -> None:
    publish([20])
    shards = open_shards(home, "tiny", "v1", "train")
    with pytest.raises(IntegrityError, match="no bad tar of pass 3"):
        view_tar(shards.folder, shards.manifest(0), bad_pass=3)
