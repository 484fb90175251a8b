from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.sets.recap import RecapDataComp

SOURCE = RecapDataComp()
BY_URL = "http://User@d.example/A%7e.jpg?Size=2"


def test_every_text_column_of_every_row_is_a_text_with_its_role(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    assert len(whole.records) == 13 + 2
    # The second file has no third caption, and an absent column is no field.
    assert len(whole.texts) == 13 * 3 + 2 * 2
    roles = {(text["field"], text["role"]) for text in whole.texts}
    assert roles == {
        ("org_caption", "alt"),
        ("re_caption", "recap"),
        ("re_caption_condition_diverse_topk", "recap_conditioned"),
    }
    assert {record["split"] for record in whole.records} == {"train"}
    assert whole.survey.columns["org_caption"] == "text:alt"
    assert any("1 of 2 files have no column re_caption_condition_diverse_topk" in note for note in whole.survey.notes)
    assert any("2 of 2,719 parts" in note for note in whole.survey.notes)


def test_a1_byte_escapes_are_kept_raw_by_the_reader(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    texts = [text["text"] for text in whole.texts]
    assert rb"CLR\xc2\xae Mold Remover" in texts
    assert SOURCE.repairs_byte_escapes


def test_a8_missing_texts_stay_in_their_place_as_null_or_as_written(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    assert whole.texts_of(BY_URL)[3:] == [
        ("org_caption", None),
        ("re_caption", b"nan"),
        ("re_caption_condition_diverse_topk", b"Bay."),
    ]


def test_a10_bytes_outside_utf8_pass_as_they_are(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    assert b"Caf\x92 menu" in [text["text"] for text in whole.texts]
    assert all(text["broken"] is None for text in whole.texts)


def test_a3_scenes_are_named_by_hash_then_url_and_never_by_key(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    ids = whole.ids
    # The dog is in both files, the red chair under two URLs, the bay twice without a hash.
    assert ids[0] == ids[13] and ids[2] == ids[3] and ids[8] == ids[9] == BY_URL
    assert ids[10] == ids[10].lower() and len(ids[10]) == 64
    assert ids[11] == "https://e.example/x.jpg"
    assert ids[12] is None
    assert whole.records[8]["image_sha256"] is None
    assert whole.records[11]["image_sha256"] is None
    keys = pq.read_table(recap_files[0])["key"].to_pylist()
    assert len(keys) == 13 and not set(keys) & set(ids)


def test_order_of_inputs_does_not_matter(recap_files: list[Path], inputs: Any) -> None:
    there, back = inputs(*recap_files), inputs(*recap_files)[::-1]
    assert SOURCE.survey(there, None).pieces == SOURCE.survey(back, None).pieces


def test_mixed_uploads_are_refused_with_both_named(
    recap_files: list[Path], recap_old_upload: Path, inputs: Any
) -> None:
    with pytest.raises(InputError, match=r"-of-02719.*-of-03550"):
        SOURCE.survey(inputs(*recap_files, recap_old_upload), None)


def test_one_part_in_two_folders_is_refused(recap_files: list[Path]) -> None:
    name = recap_files[0].name
    twice = [Input(uri=f"{config}/{name}", url=str(recap_files[0])) for config in ("default", "condition_diverse_topk")]
    with pytest.raises(InputError, match=r"there 2 times: condition_diverse_topk/.*, default/"):
        SOURCE.survey(twice, None)


def test_preview_files_are_a_split_of_their_own(read_whole: Any, recap_files: list[Path]) -> None:
    path = recap_files[0].rename(recap_files[0].with_name("preview-00000-of-00001.parquet"))
    whole = read_whole(SOURCE, path, recap_files[1])
    assert [record["split"] for record in whole.records] == ["preview"] * 13 + ["train"] * 2


def test_a_limit_takes_the_first_rows_over_all_files(read_whole: Any, recap_files: list[Path]) -> None:
    whole = read_whole(SOURCE, *recap_files)
    for limit in (1, 4, 5, 6, 13, 14, 99):
        some = read_whole(SOURCE, *recap_files, limit=limit)
        assert some.records == whole.records[:limit]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"caption": ["a"], "url": ["u"]}, "none of the text columns"),
        ({"org_captoin": ["a"], "url": ["u"]}, "Did you mean 'org_captoin'"),
        ({"org_caption": ["a"], "key": ["0"]}, "neither `sha256` nor `url`"),
        ({"org_caption": [1], "url": ["u"]}, "Column 'org_caption' of .* is int64, not a text"),
    ],
)
def test_wrong_columns_are_refused_with_those_found(
    write_parquet: Callable[..., Path], inputs: Any, columns: dict[str, Any], message: str
) -> None:
    path = write_parquet("train.parquet", pa.table(columns))
    with pytest.raises(InputError, match=message):
        SOURCE.survey(inputs(path), None)


def test_inputs_without_parquet_are_refused(write_text: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match=r"None of the inputs is parquet of recap-datacomp by its name: README\.md"):
        SOURCE.survey(inputs(write_text("README.md", b"#")), None)


def test_c12_an_all_null_column_is_read_like_one_with_texts(write_parquet: Any, read_whole: Any) -> None:
    path = write_parquet(
        "train.parquet",
        pa.table({"url": ["u", "v"], "sha256": pa.nulls(2), "org_caption": pa.nulls(2), "re_caption": ["a", "b"]}),
    )
    whole = read_whole(SOURCE, path)
    assert whole.ids == ["u", "v"]
    assert [text["text"] for text in whole.texts] == [None, b"a", None, b"b"]


def test_c4_a_file_without_rows_gives_no_piece(write_parquet: Any, read_whole: Any, recap_files: list[Path]) -> None:
    schema = pq.read_schema(recap_files[0])
    empty = write_parquet("recap/train-00002-of-02719.parquet", schema.empty_table())
    whole = read_whole(SOURCE, *recap_files, empty)
    assert len(whole.survey.pieces) == 2 and len(whole.records) == 15
