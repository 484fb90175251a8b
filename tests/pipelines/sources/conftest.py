"""Reading a source whole, with the laws that every batch of every source keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from catalog.schema import REJECT_REASONS, ROLES, SPLIT_PATTERN
from pipelines.records import RECORDS, TEXTS, Input, Piece, Source, Survey
from pipelines.sources.formats.arrow_columns import BATCH_RECORDS

Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Everything that a source reads; `record` of a text is a place in `records`."""

    survey: Survey
    records: Rows
    texts: Rows

    def texts_of(self, source_id: str | None) -> list[tuple[str, bytes | None]]:
        """(field, text) of all records with the id, in order."""
        return [(t["field"], t["text"]) for t in self.texts if self.records[t["record"]]["source_id"] == source_id]

    @property
    def ids(self) -> list[str | None]:
        """Ids of the records, in order."""
        return [record["source_id"] for record in self.records]


ReadPieces: TypeAlias = Callable[[Source, Sequence[Piece]], tuple[Rows, Rows]]
ReadWhole: TypeAlias = Callable[..., Whole]


def _read_pieces(source: Source, pieces: Sequence[Piece]) -> tuple[Rows, Rows]:
    records: Rows = []
    texts: Rows = []
    for piece in pieces:
        last = -1
        for batch in source.read(piece):
            assert batch.records.schema.equals(RECORDS)
            assert batch.texts.schema.equals(TEXTS)
            assert 0 < batch.records.num_rows <= BATCH_RECORDS
            batch.records.validate(full=True)
            batch.texts.validate(full=True)
            places = batch.texts["record"].to_pylist()
            assert places == sorted(places)
            assert not places or 0 <= places[0] <= places[-1] < batch.records.num_rows
            for text in batch.texts.to_pylist():
                texts.append(text | {"record": text["record"] + len(records)})
            rows = batch.records.to_pylist()
            numbers = [row["source_row"] for row in rows if row["source_id"] is not None]
            assert numbers == sorted(numbers) and (not numbers or numbers[0] > last)
            last = max([last, *numbers])
            records.extend(rows)
    for text in texts:
        assert text["field"] and text["role"] in ROLES
        assert text["broken"] is None or text["broken"].partition(": ")[0] in REJECT_REASONS
    for record in records:
        assert SPLIT_PATTERN.fullmatch(record["split"]) and record["source_uri"] and record["source_row"] >= 0
    return records, texts


@pytest.fixture
def read_pieces() -> ReadPieces:
    """Records and texts of some pieces."""
    return _read_pieces


@pytest.fixture
def read_whole() -> ReadWhole:
    """Survey and read inputs, given as paths that are named relative to their own folder."""

    def read(source: Source, *paths: Path, limit: int | None = None) -> Whole:
        survey = source.survey(inputs_of(*paths), limit)
        records, texts = _read_pieces(source, survey.pieces)
        scenes: dict[str, set[Any]] = {}
        for number, record in enumerate(records):
            if record["source_id"] is not None:
                scenes.setdefault(record["split"], set()).add(record["source_id"] if source.grouped else number)
        for split, found in scenes.items():
            assert sum(piece.scenes_by_split.get(split, 0) for piece in survey.pieces) >= len(found)
        assert all(piece.stop - piece.start > 0 for piece in survey.pieces)
        return Whole(survey=survey, records=records, texts=texts)

    return read


def inputs_of(*paths: Path) -> list[Input]:
    """Inputs named relative to the folder of the first."""
    return [
        Input(uri=str(p.relative_to(paths[0].parent)) if paths[0].parent in p.parents else p.name, url=str(p))
        for p in paths
    ]


@pytest.fixture
def inputs() -> Callable[..., list[Input]]:
    """`inputs_of`, for tests."""
    return inputs_of


@pytest.fixture
def write_text(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Write a file below the test's folder."""

    def write(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    """Write a table below the test's folder."""

    def write(name: str, table: pa.Table, **options: Any) -> Path:
        import pyarrow.parquet as pq

        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, **options)
        return path

    return write


def _picture(encoding: str) -> bytes:
    import io

    from PIL import Image

    sink = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 30)).save(sink, encoding)
    return sink.getvalue()


@pytest.fixture
def jpeg() -> bytes:
    """A red JPEG of 8 x 6 pixels."""
    return _picture("JPEG")


@pytest.fixture
def png() -> bytes:
    """The same as PNG."""
    return _picture("PNG")
