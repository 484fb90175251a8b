"""`pipelines.sources.sets.wit`: both layouts give the same scenes, named by picture and not by row."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infra.errors import InputError, IntegrityError
from infra.home import resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest
from pipelines.sources.sets import wit
from pipelines.sources.sets.wit import Wit

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXTS: list[list[str | None] | None] = [["a church", "page", None], ["a bridge", None, "section"], None, []]


@pytest.fixture
def parquet(write_parquet: Any, jpeg: bytes, png: bytes) -> Path:
    """Four rows in the order of the public set, which is that of text."""
    names = ["image_0.jpg", "image_1.jpg", "image_10.jpg", "image_2.jpg"]
    pictures = [{"bytes": data, "path": name} for name, data in zip(names, (jpeg, png, jpeg, b"?"), strict=True)]
    table = pa.table({"image": pa.array(pictures, STRUCT), "text": pa.array(TEXTS, pa.list_(pa.string()))})
    return Path(write_parquet("train.parquet", table, row_group_size=3))


@pytest.fixture
def folder(write_text: Any, jpeg: bytes, png: bytes) -> list[Path]:
    """The same as pictures with their metadata."""
    lines = [
        json.dumps({"file_name": f"{name}.jpg", "text": text, "origin": "https://x"})
        for name, text in zip(("image_0", "image_1", "image_10", "image_2"), TEXTS, strict=True)
    ]
    pictures = [("image_0", jpeg), ("image_1", png), ("image_10", jpeg), ("image_2", b"?")]
    return [
        write_text("train/metadata.jsonl", "\n".join(lines).encode()),
        *(write_text(f"train/{name}.jpg", data) for name, data in pictures),
    ]


def test_both_layouts_give_the_same_scenes(parquet: Path, folder: list[Path], read_whole: Any) -> None:
    tables, files = read_whole(Wit(), parquet), read_whole(Wit(), *folder)
    assert tables.ids == files.ids == ["image_0", "image_1", "image_10", "image_2"]
    for name in ("image", "image_sha256", "width", "height", "image_uri"):
        assert [r[name] for r in tables.records] == [r[name] for r in files.records], name
    assert tables.texts_of("image_1") == files.texts_of("image_1") == [("text[0]", b"a bridge")]
    # A row without a list has one absent text; an empty list has none.
    assert [t for _, t in tables.texts_of("image_10")] == [t for _, t in files.texts_of("image_10")] == [None]
    assert tables.texts_of("image_2") == files.texts_of("image_2") == []


def test_a_jpeg_keeps_its_bytes_and_another_encoding_becomes_one(parquet: Path, read_whole: Any, jpeg: bytes) -> None:
    first, second, _, fourth = read_whole(Wit(), parquet).records
    assert first["image"] == jpeg
    assert second["image"].startswith(b"\xff\xd8\xff") and second["image"] != jpeg
    assert fourth["image"] is None and fourth["image_sha256"] is not None
    assert "pillow" in Wit().writers and not Wit(pictures=False).writers


def test_contexts_are_alt_texts_when_asked_for(parquet: Path, folder: list[Path], read_whole: Any) -> None:
    for paths in ([parquet], folder):
        whole = read_whole(Wit(contexts=True), *paths)
        assert whole.texts_of("image_0") == [("text[0]", b"a church"), ("context[0]", b"page")]
        assert whole.texts_of("image_1") == [("text[0]", b"a bridge"), ("context[1]", b"section")]
        assert [t["role"] for t in whole.texts[:4]] == ["human", "alt", "human", "alt"]
        assert whole.texts_of("image_10") in ([("text", None)], [("text[0]", None)])


def test_without_pictures_none_is_read(folder: list[Path], parquet: Path, read_whole: Any) -> None:
    source = Wit(pictures=False)
    assert not source.reads("image_0.jpg") and Wit().reads("image_0.jpg")
    for paths in ([parquet], folder[:1]):
        whole = read_whole(source, *paths)
        assert all(r["image"] is None for r in whole.records) and not [t for t in whole.texts if t["broken"]]


def test_a12_a_picture_that_does_not_lie_there_makes_rejects(folder: list[Path], read_whole: Any) -> None:
    whole = read_whole(Wit(), *folder[:1], *folder[2:])
    assert [t["broken"] for t in whole.texts if t["broken"]] == [
        "missing_image: image_0.jpg does not lie beside metadata.jsonl"
    ]


def test_lines_that_do_not_parse_are_rejects(write_text: Any, read_whole: Any) -> None:
    data = b'{"file_name": "a.jpg", "text": [1]}\nnot json\n{"text": ["x"]}\n[1]\n'
    whole = read_whole(Wit(pictures=False), write_text("metadata.jsonl", data))
    assert [t["broken"].partition(":")[0] for t in whole.texts] == ["malformed_record"] * 4


def test_two_rows_of_one_name_fail_and_folders_tell_pictures_apart(tmp_path: Path, jpeg: bytes) -> None:
    def ingested(name: str, lines: list[dict[str, Any]]) -> IngestOutcome:
        root = tmp_path / name
        root.mkdir()
        (root / "metadata.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
        for line in lines:
            (root / line["file_name"]).parent.mkdir(exist_ok=True)
            (root / line["file_name"]).write_bytes(jpeg)
        request = build_request("wit", [str(root)], None, None, [], 0.2)
        with open_workers(address=None, num_cpus=0) as workers:
            return ingest(request, resolve(str(tmp_path / f"home-{name}")), workers)

    apart = ingested("apart", [{"file_name": f"{f}/1.jpg", "text": ["a"]} for f in ("a", "./b")])
    assert (apart.scenes, apart.texts_kept) == (2, 2)
    with pytest.raises(IntegrityError, match="'a/1'"):
        ingested("same", [{"file_name": f"a/1.{end}", "text": ["a"]} for end in ("jpg", "png")])


def test_pictures_are_read_in_pieces_and_only_those_that_are_named(
    write_text: Any, read_whole: Any, read_pieces: Any, jpeg: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wit, "PICTURE_ROWS", 2)
    lines = [json.dumps({"file_name": f"{n}.jpg", "text": [f"text {n}"]}) for n in range(5)]
    paths = [write_text("w/metadata.jsonl", "\n".join(lines).encode())]
    paths += [write_text(f"w/{n}.jpg", jpeg) for n in (*range(5), 99)]
    whole = read_whole(Wit(), *paths)
    assert [(p.start, p.stop) for p in whole.survey.pieces] == [(0, 2), (2, 4), (4, 5)]
    assert whole.ids == ["0", "1", "2", "3", "4"]
    assert "99.jpg" not in {file.uri for piece in whole.survey.pieces for file in piece.input.files}


def test_a_picture_without_a_path_is_named_by_its_hash(write_parquet: Any, read_whole: Any, jpeg: bytes) -> None:
    pictures = pa.array([{"bytes": jpeg, "path": None}, {"bytes": b"x", "path": "a.jpg"}, None], STRUCT)
    path = write_parquet("train.parquet", pa.table({"image": pictures, "text": ["a", "b", "c"]}))
    assert read_whole(Wit(), path).ids == [hashlib.sha256(jpeg).hexdigest(), "a", None]


def test_neither_or_both_layouts_are_refused(
    parquet: Path, folder: list[Path], inputs: Any, write_parquet: Any
) -> None:
    with pytest.raises(InputError, match="both parquet and"):
        Wit().survey(inputs(parquet, *folder), None)
    with pytest.raises(InputError, match="neither parquet nor"):
        Wit().survey(inputs(*folder[1:]), None)
    table = pa.table({"image": ["a.jpg"], "text": ["x"]})
    with pytest.raises(InputError, match="not pictures as struct"):
        Wit().survey(inputs(write_parquet("x.parquet", table)), None)


def test_a_limit_counts_rows(parquet: Path, folder: list[Path], read_whole: Any) -> None:
    for limit in range(1, 6):
        for paths in ([parquet], folder):
            assert len(read_whole(Wit(), *paths, limit=limit).records) == min(limit, 4)
