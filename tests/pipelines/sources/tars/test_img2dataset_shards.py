"""Files of a shard: what they may hold, how much of them is read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import InputError
from pipelines.sources.formats import tar_samples
from pipelines.sources.formats.discovery import find_inputs
from pipelines.sources.tars.img2dataset import Img2dataset
from tests.pipelines.sources.tar_files import (
    FETCHED,
    METADATA,
    files,
    metadata,
    read_bytes,
    tar_of,
    write_shard,
    write_stats,
    write_tar,
)

SOURCE = Img2dataset()


def test_pieces_read_their_own_samples_alone(inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"caption": f"a lamp, model {n}", "shade": n} for n in range(60)]
    came = [*range(30, 60), *range(29, -1, -1)]
    tar, parquet, _ = files(write_shard(tmp_path, rows, order=came))
    every = pq.read_table(parquet).to_pylist()
    large = [(f"{row['key']}.{end}", data) for row in every for end, data in (("bin", bytes(399_000)), ("jpg", b"x"))]
    write_tar(tar, large)
    monkeypatch.setattr(tar_samples, "PIECE_BYTES", tar.stat().st_size // 6)
    for paths in ((tar, parquet), (tar,)):
        survey = SOURCE.survey(inputs(*paths), None)
        assert len(survey.pieces) > 5
        before = read_bytes()
        numbers = [n for p in survey.pieces for b in SOURCE.read(p) for n in b.records["source_row"].to_pylist()]
        assert numbers == list(range(60))
        assert read_bytes() - before < tar.stat().st_size / 5


def test_a_limit_ends_the_survey(inputs: Any, tmp_path: Path) -> None:
    for number in range(40):
        write_shard(tmp_path, FETCHED[:3], shard=number)
    (tmp_path / "00039.parquet").write_bytes(b"not parquet")
    survey = SOURCE.survey(find_inputs([str(tmp_path)], SOURCE.reads)[1], 4)
    assert [(p.start, p.stop) for p in survey.pieces] == [(0, 3), (0, 1)]
    with pytest.raises(InputError, match=r"00039\.parquet is not a whole parquet file"):
        SOURCE.survey(find_inputs([str(tmp_path)], SOURCE.reads)[1], None)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_metadata_may_hold_its_texts_in_any_type(read_whole: Any, tmp_path: Path, kind: pa.DataType) -> None:
    paths = files(write_shard(tmp_path))
    whole = read_whole(SOURCE, *paths)
    plain = pq.read_table(paths[1])
    names = [field.name for field in plain.schema if pa.types.is_string(field.type)]
    assert len(names) == 6
    for name in names:
        plain = plain.set_column(plain.schema.get_field_index(name), name, plain[name].cast(kind))
    pq.write_table(plain, paths[1], row_group_size=4)
    found = read_whole(SOURCE, *paths)
    assert (found.records, found.texts) == (whole.records, whole.texts)


Edit = Callable[[Path], None]


def without_last_sample(tar: Path) -> None:
    tar.write_bytes(tar_of([(f"{row['key']}.txt", b"a") for row in metadata(FETCHED)[:2]]))


def with_another_sample(tar: Path) -> None:
    keys = [row["key"] for row in metadata(FETCHED) if row["status"] == "success"]
    tar.write_bytes(tar_of([(f"{key}.txt", b"a") for key in [*keys, "000009999"]]))


def with_key_twice(tar: Path) -> None:
    rows = metadata(FETCHED)
    pq.write_table(pa.Table.from_pylist([*rows, rows[0]], schema=METADATA), tar.with_suffix(".parquet"))
    tar.with_name("00000_stats.json").unlink()


def with_a_list_of_urls(tar: Path) -> None:
    pq.write_table(pa.table({"URL": ["http://a.example/1"], "TEXT": ["a"]}), tar.with_suffix(".parquet"))


def with_key_null(tar: Path) -> None:
    rows = [row | {"key": None} for row in metadata(FETCHED)]
    pq.write_table(pa.Table.from_pylist(rows, schema=METADATA), tar.with_suffix(".parquet"))


def with_stats_of_another_run(tar: Path) -> None:
    write_stats(tar.with_name("00000_stats.json"), metadata(FETCHED[:3]))


def with_own_keys(tar: Path) -> None:
    tar.with_suffix(".parquet").unlink()
    tar.write_bytes(tar_of([("beach.txt", b"a")]))


def with_pictures_twice(tar: Path) -> None:
    tar.write_bytes(tar_of([("000000000.jpg", b"1"), ("000000000.jpg", b"2")]))


def without_its_tar(tar: Path) -> None:
    tar.unlink()


def test_metadata_without_its_tar_fails_in_the_survey(tmp_path: Path) -> None:
    without_its_tar(write_shard(tmp_path))
    with pytest.raises(InputError, match=r"00000\.parquet carries no pictures, and the tar beside it is not there"):
        SOURCE.survey(find_inputs([str(tmp_path)], SOURCE.reads)[1], None)


def with_stats_alone(tar: Path) -> None:
    for path in files(tar)[:2]:
        path.unlink()


def with_a_list_for_stats(tar: Path) -> None:
    files(tar)[2].write_text("[]")


def with_a_column_of_no_name(tar: Path) -> None:
    parquet = tar.with_suffix(".parquet")
    parquet.write_bytes(parquet.read_bytes().replace(b"caption", b"c\xc5ption"))


def cut_short(tar: Path) -> None:
    tar.write_bytes(tar.read_bytes()[:3_000])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_last_sample, r"lacks 2 of the 4 samples that .*00000\.parquet calls fetched, 000000002 first"),
        (with_another_sample, r"holds 1 samples that .*00000\.parquet does not call fetched, 000009999 first"),
        (with_key_twice, r"The key 000000000 comes twice in 00000\.parquet"),
        (with_a_list_of_urls, r"00000\.parquet is no metadata of img2dataset: .*'key'.*URL, TEXT"),
        (with_key_null, r"A row of 00000\.parquet has no key"),
        (with_stats_of_another_run, r"00000_stats\.json says successes = 3, but 00000\.parquet holds 4"),
        (with_own_keys, r"00000\.tar holds a sample 'beach', but img2dataset's keys are numbers"),
        (with_pictures_twice, r"sample '000000000' of 00000\.tar has its member '000000000\.jpg' twice"),
        (cut_short, r"00000\.tar ends at byte 3,000"),
        (with_a_column_of_no_name, r"00000\.parquet is not a whole parquet file"),
        (without_its_tar, r"00000\.parquet carries no pictures, and the tar beside it is not there"),
        (with_stats_alone, r"00000_stats\.json is there, but neither the tar nor"),
        (with_a_list_for_stats, r"00000_stats\.json is no statistics"),
    ],
)
def test_files_that_do_not_agree_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    tar = write_shard(tmp_path)
    edit(tar)
    with pytest.raises(InputError, match=message):
        survey = SOURCE.survey(find_inputs([str(tmp_path)], SOURCE.reads)[1], None)
        assert [batch for piece in survey.pieces for batch in SOURCE.read(piece)] != []
