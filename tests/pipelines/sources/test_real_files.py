"""The real files, where they are: what the readers find in them is what formats.md measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.records import Source
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.sets.coco import Coco
from pipelines.sources.sets.multi30k import Multi30k
from pipelines.sources.tables.table import Table


def read(source: Source, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for piece in source.survey(find_inputs([str(path)])[1], None).pieces:
        for batch in source.read(piece):
            texts += [text | {"record": text["record"] + len(records)} for text in batch.texts.to_pylist()]
            records += batch.records.to_pylist()
    return records, texts


def test_a5_multi30k_has_five_captions_of_each_of_31014_images(real_data: Path) -> None:
    records, texts = read(Multi30k(), real_data / "multi30k")
    assert Counter(record["split"] for record in records) == {"train": 29_000, "val": 1_014, "test": 1_000}
    assert len({record["source_id"] for record in records}) == 31_014
    assert len(texts) == 155_070 and set(Counter(text["record"] for text in texts).values()) == {5}
    assert all(text["text"] and text["broken"] is None for text in texts)
    # The index is ordered by length, so words must fall from field to field.
    counts: Counter[str] = Counter()
    for text in texts:
        counts[text["field"]] += len(text["text"].split())
    words = [counts[f"{n}.en"] / 31_014 for n in range(1, 6)]
    assert words == pytest.approx([17.98, 13.93, 11.66, 9.82, 7.92], abs=0.015)


def test_a6_coco_val2017_has_five_to_seven_captions_an_image(real_data: Path) -> None:
    records, texts = read(Coco(), real_data / "coco" / "captions_val2017.json.gz")
    assert (len(records), len(texts)) == (5_000, 25_014)
    sizes = Counter(Counter(text["record"] for text in texts).values())
    assert sizes == {5: 4_987, 6: 12, 7: 1}
    assert {record["split"] for record in records} == {"val"}
    assert all(record["source_id"].isdigit() and record["width"] and record["height"] for record in records)
    raw = [text["text"] for text in texts]
    assert sum(text != text.rstrip() for text in raw) == 3_501 and sum(text.endswith(b"\n") for text in raw) == 82


def test_the_laion_sample_goes_through_the_table_source(real_data: Path) -> None:
    path = real_data / "imgtext" / "img2dataset_test_10000.parquet"
    records, texts = read(Table(text="TEXT:alt", image="URL"), path)
    assert len(records) == len(texts) == 10_000
    assert max(len(text["text"].decode()) for text in texts) == 2_041
    assert len({record["image_uri"] for record in records}) == 9_999
    assert records[42]["source_id"] == "img2dataset_test_10000.parquet#42"


def test_real_csv_with_quotes_is_read_whole(real_data: Path, tmp_path: Path) -> None:
    import gzip

    data = gzip.decompress((real_data / "flickr8k" / "captions_kaggle.txt.gz").read_bytes())
    path = tmp_path / "captions.csv"
    path.write_bytes(data)
    records, texts = read(Table(id="image"), path)
    assert len(texts) == 40_455 and len({record["source_id"] for record in records}) == 8_091
    assert sum(text["broken"] is not None for text in texts) == 0


def test_a_real_csv_with_semicolons_is_read_with_its_delimiter(real_data: Path) -> None:
    source = Table(text="sentence", id="video_id", delimiter=";")
    records, texts = read(source, real_data / "msrvtt" / "MSRVTT_JSFUSION_test.csv")
    assert len(records) == len(texts) == 1_000 and records[0]["source_id"].startswith("video")
