"""Grouping depends on the set of records alone, and every text is kept or has one reason."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import IntegrityError
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.group import Scenes, group, merge, ordered_keys
from pipelines.ingest.tables import Origin, keep, rejects_table, rows_digest, scenes_table
from pipelines.records import RECORDS, TEXTS, Batch

ORIGIN = Origin(dataset="d", version="v", split="train", shard=0)
Record = dict[str, Any]


def batch(records: list[Record]) -> Batch:
    """Records as dicts: id, row, texts, and optionally uri, roles, image, sha, frame."""
    rows, texts = [], []
    for i, r in enumerate(records):
        base = dict.fromkeys(RECORDS.names)
        rows.append(
            base
            | {"source_id": r["id"], "split": "train", "source_uri": r.get("uri", "f"), "source_row": r["row"]}
            | {"image_uri": r.get("image"), "image_sha256": r.get("sha"), "frame": r.get("frame")}
        )
        roles = r.get("roles", ["human"] * len(r["texts"]))
        for k, text in enumerate(r["texts"]):
            raw = text.encode() if isinstance(text, str) else text
            texts.append({"record": i, "field": f"t{k}", "role": roles[k], "text": raw, "broken": r.get("broken")})
    return Batch(pa.Table.from_pylist(rows, RECORDS), pa.Table.from_pylist(texts, TEXTS))


def judged(records: list[Record], **options: Any) -> Scenes:
    return group(merge([batch(records)]), config=CleanConfig(**options), repair=False)


def kept_captions(scenes: Scenes) -> dict[str, list[tuple[int, str]]]:
    table = scenes_table(scenes, keep(scenes), ORIGIN)
    return {s["scene_key"]: [(c["index"], c["text"]) for c in s["captions"]] for s in table.to_pylist()}


def reasons(scenes: Scenes) -> list[tuple[str | None, str]]:
    return [(r["text"], r["reason"]) for r in rejects_table(scenes, ORIGIN).to_pylist()]


TEXT = st.sampled_from(["a dog", "A dog.", "a cat", "", "nan", "x", "two men", b"\x92", None])
RECORD = st.builds(
    lambda i, texts: {"id": i, "texts": texts},
    st.sampled_from(["a", "b", "c", "B", "h-x", None]),
    st.lists(TEXT, max_size=3),
)


@given(st.lists(RECORD, min_size=1, max_size=10), st.randoms(use_true_random=False), st.integers(1, 4))
def test_any_order_and_any_batches_give_the_same_rows(records: list[Record], rng: random.Random, cuts: int) -> None:
    for row, record in enumerate(records):
        record["row"] = row
    shuffled = rng.sample(records, len(records))
    parts = [batch(shuffled[i::cuts]) for i in range(cuts)]
    one = judged(records)
    other = group(merge(parts), config=CleanConfig(), repair=False)
    assert scenes_table(one, keep(one), ORIGIN) == scenes_table(other, keep(other), ORIGIN)
    assert rejects_table(one, ORIGIN) == rejects_table(other, ORIGIN)


@given(st.lists(RECORD, min_size=1, max_size=10))
def test_every_text_is_kept_or_rejected_once(records: list[Record]) -> None:
    for row, record in enumerate(records):
        record["row"] = row
    scenes = judged(records)
    kept = keep(scenes)
    table = scenes_table(scenes, kept, ORIGIN)
    n_kept = sum(len(s["captions"]) for s in table.to_pylist())
    assert n_kept + rejects_table(scenes, ORIGIN).num_rows == sum(len(r["texts"]) for r in records)
    assert all(len(s["captions"]) > 0 for s in table.to_pylist())


def test_a6_a_scene_keeps_as_many_captions_as_it_has() -> None:
    records = [
        {"id": str(i), "row": 10 * i + j, "texts": [f"{i} {j}"]} for i, n in enumerate([5, 5, 6, 7]) for j in range(n)
    ]
    assert [len(c) for c in kept_captions(judged(records)).values()] == [5, 5, 6, 7]


def test_a8_a_missing_caption_shifts_no_index() -> None:
    scenes = judged([{"id": "a", "row": 0, "texts": ["one", None, "nan", "four"]}])
    assert kept_captions(scenes) == {"a": [(0, "one"), (3, "four")]}


def test_repeats_within_a_scene_are_rejected_and_the_first_stays() -> None:
    scenes = judged(
        [
            {"id": "a", "row": 0, "texts": ["A dog.", "A dog.", "a DOG", "a cat"]},
            {"id": "b", "row": 1, "texts": ["A dog."]},
        ]
    )
    assert kept_captions(scenes) == {"a": [(0, "A dog."), (3, "a cat")], "b": [(0, "A dog.")]}
    assert reasons(scenes) == [("A dog.", "exact_repeat"), ("a DOG", "normalised_repeat")]


def test_texts_of_different_signs_are_no_repeats() -> None:
    assert reasons(judged([{"id": "a", "row": 0, "texts": ["!!!", "???"]}])) == []


def test_an_exact_repeat_of_a_normalised_repeat_is_exact() -> None:
    scenes = judged([{"id": "a", "row": 0, "texts": ["a dog", "A dog!", "A dog!"]}])
    assert [r for _, r in reasons(scenes)] == ["normalised_repeat", "exact_repeat"]


def test_a2_one_hash_under_unrelated_captions_is_quarantined() -> None:
    texts = ["red running shoes", "oak dining table", "patent drawing 4", "winter tyre sale"]
    unrelated = [
        {"id": "s", "row": i, "texts": [t], "roles": ["alt"], "image": f"http://h{i}/x.jpg", "sha": "s"}
        for i, t in enumerate(texts)
    ]
    scenes = judged(unrelated)
    assert kept_captions(scenes) == {}
    assert [r for _, r in reasons(scenes)] == ["placeholder_group"] * 4


def test_a2_one_hash_under_like_captions_is_one_scene() -> None:
    texts = ["red running shoes", "red running shoes for men", "running shoes red", "red shoes running sale"]
    like = [
        {"id": "s", "row": i, "texts": [t], "roles": ["alt"], "image": f"http://h{i}/x.jpg", "sha": "s"}
        for i, t in enumerate(texts)
    ]
    scenes = judged(like)
    assert [text for _, text in kept_captions(scenes)["s"]] == texts


def test_a2_query_strings_are_no_other_pages() -> None:
    same_page = [
        {"id": "s", "row": i, "texts": [t], "roles": ["alt"], "image": f"http://h/x.jpg?v={i}", "sha": "s"}
        for i, t in enumerate(["one", "two", "three", "four"])
    ]
    assert reasons(judged(same_page)) == []


def test_a2_a_group_over_the_limit_is_quarantined_whole() -> None:
    records = [{"id": "s", "row": i, "texts": [f"text {i}"]} for i in range(5)]
    scenes = judged([*records, {"id": "t", "row": 9, "texts": ["other"]}], max_group_records=4)
    assert kept_captions(scenes) == {"t": [(0, "other")]}
    assert {r for _, r in reasons(scenes)} == {"oversized_group"}


def test_a_record_without_an_id_is_rejected_and_disturbs_nobody() -> None:
    scenes = judged([{"id": None, "row": 0, "texts": ["lost"]}, {"id": "a", "row": 1, "texts": ["kept"]}])
    assert kept_captions(scenes) == {"a": [(0, "kept")]}
    rows = rejects_table(scenes, ORIGIN).to_pylist()
    assert [(r["text"], r["reason"], r["scene_key"], r["source_row"]) for r in rows] == [
        ("lost", "missing_id", None, 0)
    ]


def test_the_reader_may_reject_a_text_itself() -> None:
    scenes = judged([{"id": "a", "row": 0, "texts": ["x"], "broken": "malformed_record: 3 fields, expected 2"}])
    row = rejects_table(scenes, ORIGIN).to_pylist()[0]
    assert (row["reason"], row["detail"]) == ("malformed_record", "3 fields, expected 2")


def test_a10_bytes_that_are_not_utf8_are_kept_exactly_in_the_reject() -> None:
    row = rejects_table(judged([{"id": "a", "row": 0, "texts": [b"it\x92s"]}]), ORIGIN).to_pylist()[0]
    assert (row["reason"], row["text"], row["raw"]) == ("invalid_utf8", "it\\x92s", b"it\x92s")


def test_illegal_ids_are_hashed_and_legal_ones_stay() -> None:
    keys = list(
        kept_captions(judged([{"id": i, "row": 0, "texts": ["x"]} for i in ["ok-1", "Upper", "h-x", "a/b", "a\n"]]))
    )
    assert keys[-1] == "ok-1"
    assert len(keys) == 5
    assert all(k.startswith("h-") and len(k) == 34 for k in keys[:-1])


def test_a_collision_of_keys_is_an_error() -> None:
    ids, keys = pa.array(["a", "b", "c"], pa.large_string()), pa.array(["k", "l", "k"], pa.large_string())
    with pytest.raises(IntegrityError, match="'a' and 'c' give one scene key 'k'"):
        ordered_keys(ids, keys)


def test_images_of_a_scene_are_listed_once_in_record_order() -> None:
    records = [
        {"id": "s", "row": 0, "texts": ["a b"], "image": "u1", "sha": "s"},
        {"id": "s", "row": 1, "texts": ["c d"], "image": "u0", "sha": "s"},
        {"id": "s", "row": 2, "texts": ["e f"], "image": "u1", "sha": "s"},
        {"id": "t", "row": 3, "texts": ["g"]},
    ]
    scenes = judged(records)
    table = scenes_table(scenes, keep(scenes), ORIGIN).to_pylist()
    assert [[i["uri"] for i in s["images"]] for s in table] == [["u1", "u0"], []]


def test_c8_columns_without_a_value_have_their_declared_type() -> None:
    scenes = judged([{"id": "a", "row": 0, "texts": ["x"]}])
    from catalog import schema

    assert scenes_table(scenes, keep(scenes), ORIGIN).schema == schema.SCENES
    empty = judged([])
    assert scenes_table(empty, keep(empty), ORIGIN).schema == schema.SCENES
    assert rejects_table(empty, ORIGIN).schema == schema.REJECTS


def test_the_digest_of_rows_ignores_version_and_slicing_but_no_value() -> None:
    scenes = judged([{"id": str(i), "row": i, "texts": [f"text {i}"], "image": f"u{i}"} for i in range(4)])
    table = scenes_table(scenes, keep(scenes), ORIGIN)
    other_version = scenes_table(scenes, keep(scenes), Origin(dataset="d", version="w", split="train", shard=0))
    assert rows_digest(table) == rows_digest(other_version)
    sliced = pa.concat_tables([table[:2], table[2:]])
    assert rows_digest(sliced) == rows_digest(table)
    assert rows_digest(table[1:]) == rows_digest(table[1:].take(np.arange(3)))
    assert len({rows_digest(table), rows_digest(table[1:]), rows_digest(table.slice(0, 3))}) == 3


def test_the_digest_tells_apart_moved_borders_between_texts() -> None:
    one = pa.table({"t": pa.array(["ab", "c"], pa.large_string())})
    other = pa.table({"t": pa.array(["a", "bc"], pa.large_string())})
    absent = pa.table({"t": pa.array(["", None], pa.large_string())})
    empty = pa.table({"t": pa.array(["", ""], pa.large_string())})
    assert len({rows_digest(t) for t in (one, other, absent, empty)}) == 4
