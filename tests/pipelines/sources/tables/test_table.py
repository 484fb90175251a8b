from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from infra.errors import ConfigError, InputError
from pipelines.sources.tables.table import Table


def test_rows_without_an_id_column_are_scenes_named_by_their_address(write_parquet: Any, read_whole: Any) -> None:
    path = write_parquet("a.parquet", pa.table({"caption": ["a", None], "url": ["u", "v"]}))
    whole = read_whole(Table(text="caption:alt", image="url"), path)
    assert whole.ids == ["a.parquet#0", "a.parquet#1"]
    assert [record["image_uri"] for record in whole.records] == ["u", "v"]
    assert [(t["field"], t["role"], t["text"]) for t in whole.texts] == [
        ("caption", "alt", b"a"),
        ("caption", "alt", None),
    ]
    assert not Table().grouped and Table(id="x").grouped and not Table(id="x", unique=True).grouped
    assert whole.survey.cuttable


def test_lists_and_single_texts_become_fields_in_the_order_of_the_option(write_parquet: Any, read_whole: Any) -> None:
    columns = {"many": pa.array([["a", None, "c"], None, []], pa.list_(pa.string())), "one": ["x", "y", "z"]}
    path = write_parquet("a.parquet", pa.table(columns))
    whole = read_whole(Table(text="many,one:recap"), path)
    assert whole.texts_of("a.parquet#0") == [("many[0]", b"a"), ("many[1]", None), ("many[2]", b"c"), ("one", b"x")]
    # No list at all is an absent text, an empty list is none.
    assert whole.texts_of("a.parquet#1") == [("many", None), ("one", b"y")]
    assert whole.texts_of("a.parquet#2") == [("one", b"z")]
    assert {text["role"] for text in whole.texts} == {"human", "recap"}


def test_numbers_name_scenes_in_decimal(write_parquet: Any, read_whole: Any) -> None:
    columns = {"caption": ["a", "b", "c"], "i": pa.array([7, None, 2**62]), "f": [7.0, None, 12.0], "w": [1, -1, 2**40]}
    path = write_parquet("a.parquet", pa.table(columns))
    assert read_whole(Table(id="i", width="w"), path).ids == ["7", None, str(2**62)]
    assert read_whole(Table(id="f"), path).ids == ["7", None, "12"]
    assert [r["width"] for r in read_whole(Table(id="i", width="w"), path).records] == [1, None, None]
    path = write_parquet("b.parquet", pa.table({"caption": ["a", "b"], "f": [7.0, 7.5]}))
    with pytest.raises(InputError, match="not whole"):
        read_whole(Table(id="f"), path)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_texts_of_every_arrow_type_are_read_as_bytes(write_parquet: Any, read_whole: Any, kind: pa.DataType) -> None:
    path = write_parquet(
        "a.parquet", pa.table({"caption": pa.array(["a", None, "é"]).cast(kind), "id": ["x", "y", "x"]})
    )
    whole = read_whole(Table(id="id"), path)
    assert [text["text"] for text in whole.texts] == [b"a", None, "é".encode()]
    assert whole.ids == ["x", "y", "x"]


def test_a10_bytes_outside_utf8_pass_in_texts_and_cost_a_record_its_id(write_parquet: Any, read_whole: Any) -> None:
    raw = pa.array([b"caf\x92", b"ok"]).view(pa.string())
    path = write_parquet("a.parquet", pa.table({"caption": raw, "id": raw, "url": raw}))
    whole = read_whole(Table(id="id", image="url"), path)
    assert whole.ids == [None, "ok"]
    assert [text["text"] for text in whole.texts] == [b"caf\x92", b"ok"]
    assert whole.texts[0]["broken"] == "malformed_record: the scene id in `id` is not UTF-8"
    assert whole.texts[1]["broken"] is None
    assert [record["image_uri"] for record in whole.records] == ["caf%92", "ok"]


def test_a_split_column_is_counted_by_the_survey_and_blank_ones_are_rejects(
    write_parquet: Any, write_text: Any, read_whole: Any
) -> None:
    source = Table(text="caption", split="column:part", id="id")
    table = pa.table({"caption": list("abcd"), "id": list("wxyz"), "part": ["val", "train", None, "val"]})
    lines = b"caption,id,part\na,w,val\nb,x,train\nc,y,\nd,z,val\n"
    for path in (write_parquet("a.parquet", table), write_text("a.csv", lines)):
        whole = read_whole(source, path)
        assert [piece.scenes_by_split for piece in whole.survey.pieces] == [{"train": 2, "val": 2}]
        assert [record["split"] for record in whole.records] == ["val", "train", "train", "val"]
        assert whole.ids == ["w", "x", None, "z"]
        assert [text["broken"] is None for text in whole.texts] == [True, True, False, True]
    for path in (
        write_parquet("b.parquet", pa.table({"caption": ["a"], "id": ["x"], "part": ["Train set"]})),
        write_text("b.csv", b"caption,id,part\na,x,Train set\n"),
    ):
        with pytest.raises(InputError, match="'Train set'.*cannot name a split"):
            read_whole(source, path)


def test_c11_c12_files_may_differ_in_order_nullability_and_empty_columns(write_parquet: Any, read_whole: Any) -> None:
    schema = pa.schema([pa.field("caption", pa.string(), nullable=False), pa.field("url", pa.string())])
    one = write_parquet("a.parquet", pa.table({"caption": ["a"], "url": ["u"]}, schema=schema))
    two = write_parquet(
        "b.parquet", pa.table({"url": pa.nulls(1), "caption": pa.array(["b"], pa.large_string()), "extra": [1]})
    )
    none = write_parquet("c.parquet", schema.empty_table())
    whole = read_whole(Table(image="url"), one, two, none)
    assert [text["text"] for text in whole.texts] == [b"a", b"b"]
    assert [record["image_uri"] for record in whole.records] == ["u", None]


def test_the_caption_column_is_guessed_by_known_names_and_said(
    write_parquet: Any, write_text: Any, read_whole: Any
) -> None:
    path = write_parquet("a.parquet", pa.table({"URL": ["u"], "TEXT": ["a"], "__index_level_0__": [0]}))
    whole = read_whole(Table(), path)
    assert whole.texts_of("a.parquet#0") == [("TEXT", b"a")]
    assert any("'TEXT', a guess" in note for note in whole.survey.notes)
    with pytest.raises(InputError, match=r"known caption name .*source\.text=.*URL, label"):
        read_whole(Table(), write_parquet("b.parquet", pa.table({"URL": ["u"], "label": ["a"]})))
    with pytest.raises(InputError, match=r"The captions of c\.csv are in 'text', those of d\.csv in 'caption'"):
        read_whole(Table(), write_text("c.csv", b"text\na\n"), write_text("d.csv", b"caption,text\na,b\n"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "Caption"}, r"no column 'Caption'. Did you mean 'caption'\? Its columns: caption, when, n, pic"),
        ({"text": "caption", "image": "picture"}, "no column 'picture'"),
        ({"text": "when"}, "Column 'when' of a.parquet is timestamp.*not a text or a list"),
        ({"text": "n"}, "Column 'n' of a.parquet is int64"),
        ({"text": "caption", "image": "pic"}, "Pictures inside a table are not read"),
        ({"text": "caption", "id": "when"}, "not a text or a whole number"),
        ({"text": "caption", "width": "caption"}, "not a number"),
    ],
)
def test_a_wrong_column_is_refused_with_those_there_are(
    write_parquet: Any, inputs: Any, options: dict[str, str], message: str
) -> None:
    columns: dict[str, Any] = {
        "caption": ["a"],
        "when": pa.array([0], pa.timestamp("us")),
        "n": [1],
        "pic": [{"bytes": b"x"}],
    }
    with pytest.raises(InputError, match=message):
        Table(**options).survey(inputs(write_parquet("a.parquet", pa.table(columns))), None)  # type: ignore[arg-type]


def test_two_columns_of_one_name_are_refused(write_parquet: Any, inputs: Any) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["caption", "caption"])
    with pytest.raises(InputError, match="2 columns named 'caption'"):
        Table().survey(inputs(write_parquet("a.parquet", table)), None)


@pytest.mark.parametrize(
    "options",
    [
        {"text": "a,,b"},
        {"text": "a,a:alt"},
        {"split": "No"},
        {"split": "column:"},
        {"unique": True},
        {"delimiter": "||"},
        {"delimiter": '"'},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Table(**options)


def test_a_suffix_that_is_no_role_belongs_to_the_column(write_text: Any, read_whole: Any) -> None:
    path = write_text("a.csv", b"dc:title\nx\n")
    assert read_whole(Table(text="dc:title"), path).texts_of("a.csv#0") == [("dc:title", b"x")]


CSV = (
    b'\xef\xbb\xbfid,caption\r\n1,"He said ""hi"",\r\ntwice"\r\n2,nul \x00 byte\r\n3,caf\x92\r\n\r\n'
    b"4,too,many\r\n5,\r\n6\r\n7,ok\r\n"
)


def test_csv_is_strict_and_keeps_the_bytes(write_text: Any, read_whole: Any) -> None:
    whole = read_whole(Table(text="caption", id="id"), write_text("a.csv", CSV))
    assert whole.texts_of("1") == [("caption", b'He said "hi",\r\ntwice')]
    assert whole.texts_of("2") == [("caption", b"nul \x00 byte")]
    assert whole.texts_of("3") == [("caption", b"caf\x92")]
    assert whole.texts_of("5") == [("caption", b"")]
    assert whole.texts_of(None) == [("line", b"4,too,many"), ("line", b"6")]
    assert [t["broken"] for t in whole.texts if t["broken"]] == [
        "malformed_record: 3 fields, but the header names 2",
        "malformed_record: 1 fields, but the header names 2",
    ]
    assert [record["source_row"] for record in whole.records] == [0, 1, 2, 3, 4, 5, 6]
    assert not whole.survey.cuttable
    assert [(piece.start, piece.stop) for piece in whole.survey.pieces] == [(0, 7)]


def test_one_stray_quote_does_not_swallow_the_rest_of_a_csv(write_text: Any, read_whole: Any) -> None:
    lines = ['a "fine" one'] + [f"caption {i}" for i in range(5_000)]
    lines[100] = '"never closed'
    lines[3_000] = '"closed" too early'
    path = write_text("a.csv", "\n".join(["caption", *lines]).encode())
    whole = read_whole(Table(), path)
    assert len(whole.texts) == len(lines)
    assert [t["text"].decode() for t in whole.texts] == lines
    assert [t["record"] for t in whole.texts if t["broken"]] == [100, 3_000]


def test_gzip_tabs_and_other_delimiters_are_read(write_text: Any, read_whole: Any) -> None:
    import gzip

    plain = b"video\tcaption\nv1\ta, b\n"
    expected = [("caption", b"a, b")]
    assert read_whole(Table(id="video"), write_text("a.tsv", plain)).texts_of("v1") == expected
    assert read_whole(Table(id="video"), write_text("a.tsv.gz", gzip.compress(plain))).texts_of("v1") == expected
    semicolons = write_text("b.csv", plain.replace(b"\t", b";"))
    assert read_whole(Table(id="video", delimiter=";"), semicolons).texts_of("v1") == expected


JSONL = (
    b'{"id": 1, "caption": ["a", null, 5]}\n'
    b'{"id": "x", "caption": "caf\x92"}\n'
    b'{"id": "y", "caption": "lone \\udc8f"}\n'
    b"\n"
    b'{"id": 2}\n'
    b'{"id": 2, "caption": NaN}\n'
    b'["id", 3]\n'
    b'{"id": 4, "caption": "cut'
)


def test_a_member_that_the_first_thousand_lines_lack_is_found(write_text: Any, read_whole: Any) -> None:
    lines = b'{"id": "early"}\n' * 1_200 + b'{"id": "late", "caption": "found"}\n'
    whole = read_whole(Table(text="caption", id="id"), write_text("a.jsonl", lines))
    assert whole.texts_of("late") == [("caption", b"found")]
    with pytest.raises(InputError, match="no column 'captoin'. Did you mean 'caption'"):
        read_whole(Table(text="captoin", id="id"), write_text("b.jsonl", lines))


def test_a12_a8_a10_json_lines_keep_what_can_be_read_and_reject_the_rest(write_text: Any, read_whole: Any) -> None:
    whole = read_whole(Table(text="caption", id="id"), write_text("a.jsonl", JSONL))
    assert whole.texts_of("1") == [("caption[0]", b"a"), ("caption[1]", None), ("caption[2]", b"5")]
    assert whole.texts_of("x") == [("caption", b"caf\x92")]
    (_, lone), *_ = whole.texts_of("y")
    with pytest.raises(UnicodeDecodeError):
        lone.decode()
    assert whole.texts_of("2") == [("caption", None)]
    assert [text for _, text in whole.texts_of(None)] == JSONL.splitlines()[5:]
    broken = [text["broken"] for text in whole.texts if text["broken"]]
    assert broken[0] == "malformed_record: `caption[2]` is a number, not a text"
    assert broken[1].startswith("malformed_record: not JSON: NaN")
    assert broken[2] == "malformed_record: the line is a list, not an object"
    assert broken[3].startswith("malformed_record: not JSON: Unterminated string")
    # The row is the line, so that a reject can be found with any editor.
    assert [record["source_row"] for record in whole.records] == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("id_", "name"),
    [
        (b"12", "12"),
        (b"12.0", "12"),
        (b'"12"', "12"),
        (b"null", None),
        (b'""', None),
        (b"12.5", None),
        (b"true", None),
        (b'"\\ud800"', None),
    ],
)
def test_ids_in_json_are_texts_or_whole_numbers(write_text: Any, read_whole: Any, id_: bytes, name: str | None) -> None:
    path = write_text("a.jsonl", b'{"caption": "a", "id": ' + id_ + b"}\n")
    assert read_whole(Table(id="id"), path).ids == [name]


def test_a_thousand_lists_inside_one_another_are_one_reject(write_text: Any, read_whole: Any) -> None:
    """orjson parses deeper nesting than json can write, which ended the job with a RecursionError."""
    nested = b'{"caption": {"a": ' + b"[" * 1_000 + b"]" * 1_000 + b"}}\n"
    whole = read_whole(Table(), write_text("a.jsonl", nested + b'{"caption": "b"}\n'))
    assert [text["text"] for text in whole.texts] == [None, b"b"]
    assert [text["broken"] for text in whole.texts] == ["malformed_record: `caption` is an object, not a text", None]


def test_wrong_members_and_empty_files_are_refused(write_text: Any, inputs: Any) -> None:
    cases = [
        ("a.jsonl", b'{"captoin": "a"}\n', Table(text="caption"), "no column 'caption'. Did you mean 'captoin'"),
        ("b.jsonl", b'[{"caption": "a"}]', Table(), "None of the first lines .* is a JSON object"),
        ("c.csv", b"", Table(), "has no CSV header: it is empty"),
        ("d.csv", b"a,b,a\n1,2,3\n", Table(text="a"), "names the column 'a' twice"),
        ("e.csv", "caption\nx\n".encode("utf-16"), Table(), "is UTF-16"),
        ("f.csv.gz", b"\x1f\x8b\x08\x00cut", Table(), "not whole gzip"),
        ("g.json", b"{}", Table(), "None of the inputs is a table by its name"),
    ]
    for name, data, source, message in cases:
        with pytest.raises(InputError, match=message):
            source.survey(inputs(write_text(name, data)), None)


def test_a_limit_counts_rows_over_files_in_the_order_of_their_names(
    write_parquet: Any, write_text: Any, read_whole: Any, inputs: Any
) -> None:
    files = [
        write_text("c.jsonl", b'{"caption": "f"}\n{"caption": "g"}\n'),
        write_text("b.csv", b"caption\nd\ne\n"),
        write_parquet("a.parquet", pa.table({"caption": ["a", "b", "c"]})),
    ]
    for limit in range(1, 8):
        whole = read_whole(Table(), *files, limit=limit)
        assert [text["text"] for text in whole.texts] == [letter.encode() for letter in "abcdefg"[:limit]]
    assert Table().survey(inputs(*files), None).pieces == Table().survey(inputs(*files[::-1]), None).pieces


def test_any_cut_of_a_file_gives_the_same_rows(
    write_parquet: Any, write_text: Any, read_whole: Any, read_pieces: Any
) -> None:
    captions = [f"caption {i}" for i in range(50)]
    files: list[Path] = [
        write_parquet("a.parquet", pa.table({"caption": captions}), row_group_size=7),
        write_text("a.csv", "\n".join(["caption", *captions]).encode()),
        write_text("a.jsonl", "".join(f'{{"caption": "{c}"}}\n\n' for c in captions).encode()),
    ]
    for path in files:
        whole = read_whole(Table(), path)
        assert len(whole.records) == 50
        piece = whole.survey.pieces[0]
        cuts = [0, 1, 6, 7, 8, 30, piece.stop]
        pieces = [replace(piece, start=a, stop=b) for a, b in pairwise(cuts)]
        assert read_pieces(Table(), pieces) == (whole.records, whole.texts)


def test_c1_the_texts_of_a_large_batch_have_64_bit_offsets(write_parquet: Any, inputs: Any) -> None:
    path = write_parquet("a.parquet", pa.table({"caption": np.repeat("x" * 100, 1_000)}))
    batch = next(iter(Table().read(Table().survey(inputs(path), None).pieces[0])))
    assert batch.texts.schema.field("text").type == pa.large_binary()
