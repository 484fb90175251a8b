"""From the records of one shard to scenes: order, keys, groups, repeats, and the reason for everything left out.

Owns: the canonical order of records and captions, scene keys and their collisions, the rules that look at a whole scene.
Does not own: the rule for one text (`clean`), files (`shards`).
Invariant: the result depends on the set of records, not on the order or the batches in which they came; every row of
`TEXTS` is either kept or has exactly one reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from catalog import schema
from catalog.wording import normal_form
from infra.errors import IntegrityError
from pipelines.arrays import Ints, column, is_none, run_starts
from pipelines.ingest.clean import CleanConfig, clean_texts
from pipelines.records import RECORDS, TEXTS, Batch


@dataclass(frozen=True)
class Scenes:
    """Records and texts in canonical order, with what became of each text.

    keys (S,): scene keys, ascending by bytes; may include scenes that keep no caption.
    record_scene (R,), text_scene (T,): scene of each record and text, -1 for records without an id; ascending but for
    those, which come last. text_index (T,): place of the text among all of its scene. reason (T,): None when kept.
    """

    keys: pa.LargeStringArray
    records: pa.Table
    record_scene: Ints
    texts: pa.Table
    text_record: Ints
    text_scene: Ints
    text_index: Ints
    cleaned: pa.LargeStringArray
    repaired: NDArray[np.bool_]
    reason: NDArray[np.object_]
    detail: dict[int, str]


def merge(batches: Iterable[Batch]) -> Batch:
    """One batch from many, texts renumbered; empty tables of the right schema when there are none."""
    records: list[pa.Table] = []
    texts: list[pa.Table] = []
    total = 0
    for batch in batches:
        if total:
            shifted = pc.add(batch.texts["record"], pa.scalar(total, pa.int64()))
            texts.append(batch.texts.set_column(0, TEXTS.field("record"), shifted))
        else:
            texts.append(batch.texts)
        records.append(batch.records)
        total += batch.records.num_rows
    if not records:
        return Batch(RECORDS.empty_table(), TEXTS.empty_table())
    return Batch(
        pa.concat_tables(records).unify_dictionaries().combine_chunks(),
        pa.concat_tables(texts).unify_dictionaries().combine_chunks(),
    )


def group(batch: Batch, *, config: CleanConfig, repair: bool) -> Scenes:
    """Order the records of a shard, clean their texts and judge every scene.

    Raises IntegrityError when two source ids give one scene key.
    """
    keys, scene_of_record = _scene_of_records(column(batch.records, "source_id"))
    order = np.lexsort((_ints(batch.records, "source_row"), _uri_ranks(batch.records), scene_of_record))
    records = batch.records.take(pa.array(order))
    record_scene = scene_of_record[order]
    new_place = np.empty(len(order), np.int64)
    new_place[order] = np.arange(len(order))
    text_record = new_place[_ints(batch.texts, "record")]
    text_order = np.argsort(text_record, kind="stable")
    texts = batch.texts.take(pa.array(text_order))
    text_record = text_record[text_order]
    text_scene = record_scene[text_record] - 1
    record_scene = record_scene - 1
    # Records without an id sort first as scene 0 and become -1 here; `_nameless_last` puts them behind the scenes.
    records, record_scene, texts, text_record, text_scene = _nameless_last(
        records, record_scene, texts, text_record, text_scene
    )
    cleaned = clean_texts(column(texts, "text"), repair=repair, entities=config.html_entities)
    reason, detail = cleaned.reason, cleaned.detail
    reason[text_scene < 0] = "missing_id"
    _judge_reader(texts, reason, detail)
    _judge_groups(_Ordered(records, record_scene, texts, text_record, text_scene), reason, detail, config)
    if config.repeats:
        _judge_repeats(column(texts, "text"), cleaned.text, cleaned.sums, text_scene, reason)
    return Scenes(
        keys=keys,
        records=records,
        record_scene=record_scene,
        texts=texts,
        text_record=text_record,
        text_scene=text_scene,
        text_index=_places(text_scene),
        cleaned=cleaned.text,
        repaired=cleaned.repaired,
        reason=reason,
        detail=detail,
    )


# --- order --------------------------------------------------------------------------------------------------------


def _scene_of_records(source_id: pa.LargeStringArray) -> tuple[pa.LargeStringArray, Ints]:
    """Sorted scene keys, and for each record 1 + the rank of its key (0: no id)."""
    encoded = source_id.dictionary_encode()
    ids, codes = encoded.dictionary, encoded.indices
    keys, order = ordered_keys(ids, scene_keys(ids))
    rank = np.empty(len(ids), np.int64)
    rank[order] = np.arange(1, len(ids) + 1)
    plain = np.asarray(codes.fill_null(-1), np.int64)
    scene = np.where(plain < 0, 0, rank[plain] if len(rank) else 0)
    return keys, scene.astype(np.int64)


def ordered_keys(ids: pa.LargeStringArray, keys: pa.LargeStringArray) -> tuple[pa.LargeStringArray, Ints]:
    """Keys in ascending order of their bytes, and the places they came from.

    Raises IntegrityError when two different ids have one key: two scenes would silently become one.
    """
    order = np.asarray(pc.sort_indices(keys), np.int64)
    ordered = keys.take(pa.array(order))
    same: Ints = np.flatnonzero(np.asarray(pc.equal(ordered[1:], ordered[:-1])))
    if len(same):
        first, second = sorted(ids[int(order[same[0] + i])].as_py() for i in (0, 1))
        message = f"The source ids {first!r} and {second!r} give one scene key {ordered[int(same[0])].as_py()!r}. Two scenes would become one; rename one of the ids."
        raise IntegrityError(message)
    return ordered, order


def scene_keys(ids: pa.LargeStringArray) -> pa.LargeStringArray:
    """`catalog.schema.scene_key` for an array without nulls; only ids that are no legal key go through Python."""
    legal = pc.and_not(
        pc.match_substring_regex(ids, f"^(?:{schema.KEY_PATTERN.pattern})\\z"),
        pc.starts_with(ids, schema.HASHED_PREFIX),
    )
    if pc.all(legal).as_py() is not False:
        return ids
    hashed = pa.array([schema.scene_key(i) for i in ids.filter(pc.invert(legal)).to_pylist()], pa.large_string())
    return pc.replace_with_mask(ids, pc.invert(legal), hashed)


def _uri_ranks(records: pa.Table) -> Ints:
    encoded = column(records, "source_uri")
    uris = encoded.dictionary.to_pylist()
    rank = np.empty(max(1, len(uris)), np.int64)
    rank[sorted(range(len(uris)), key=lambda i: uris[i])] = np.arange(len(uris))
    return rank[np.asarray(encoded.indices, np.int64)]


def _nameless_last(
    records: pa.Table, record_scene: Ints, texts: pa.Table, text_record: Ints, text_scene: Ints
) -> tuple[pa.Table, Ints, pa.Table, Ints, Ints]:
    nameless = int(np.searchsorted(record_scene, 0))
    if nameless == 0:
        return records, record_scene, texts, text_record, text_scene
    cut = int(np.searchsorted(text_scene, 0))
    total = len(record_scene)
    return (
        pa.concat_tables([records[nameless:], records[:nameless]]).combine_chunks(),
        np.roll(record_scene, -nameless),
        pa.concat_tables([texts[cut:], texts[:cut]]).combine_chunks(),
        (np.roll(text_record, -cut) - nameless) % total,
        np.roll(text_scene, -cut),
    )


def _places(scene: Ints) -> Ints:
    """0, 1, 2, ... within each run of equal values."""
    if len(scene) == 0:
        return np.zeros(0, np.int64)
    starts = run_starts(scene)
    return np.arange(len(scene)) - np.repeat(starts, np.diff(np.append(starts, len(scene))))


# --- judgement ----------------------------------------------------------------------------------------------------


def _judge_reader(texts: pa.Table, reason: NDArray[np.object_], detail: dict[int, str]) -> None:
    broken = column(texts, "broken")
    if broken.null_count == len(broken):
        return
    for row in np.flatnonzero(np.asarray(broken.is_valid())).tolist():
        why, _, what = broken[row].as_py().partition(": ")
        reason[row] = why
        detail[row] = what


@dataclass(frozen=True)
class _Ordered:
    """Records and texts in canonical order, with the scene of each."""

    records: pa.Table
    record_scene: Ints
    texts: pa.Table
    text_record: Ints
    text_scene: Ints


def _judge_groups(ordered: _Ordered, reason: NDArray[np.object_], detail: dict[int, str], config: CleanConfig) -> None:
    """Quarantine whole scenes: too many records, or one picture under unrelated descriptions."""
    record_scene, text_scene = ordered.record_scene, ordered.text_scene
    starts = run_starts(record_scene)
    counts = np.diff(np.append(starts, len(record_scene)))
    large = counts >= min(config.placeholder_urls, config.max_group_records + 1)
    for start, count in zip(starts[large].tolist(), counts[large].tolist(), strict=True):
        scene = int(record_scene[start])
        if scene < 0:
            continue
        samples = count if count <= config.max_group_records else _samples(ordered.records[start : start + count])
        if samples > config.max_group_records:
            why, what = "oversized_group", f"{samples} records, at most {config.max_group_records}"
        else:
            similarity = _alt_similarity(ordered, slice(start, start + count), reason, config)
            if similarity is None or similarity >= config.placeholder_similarity:
                continue
            why, what = "placeholder_group", f"mean word similarity {similarity:.3f} over {count} records"
        low, high = np.searchsorted(text_scene[: _named(text_scene)], [scene, scene + 1])
        for row in range(int(low), int(high)):
            if reason[row] is None:
                reason[row], detail[row] = why, what


def _samples(records: pa.Table) -> int:
    """Number of records of a scene, those of one row of the input (its frames) counted once."""
    place = np.stack([_uri_ranks(records), _ints(records, "source_row")])
    return 1 + int(np.any(place[:, 1:] != place[:, :-1], axis=0).sum())


def _named(text_scene: Ints) -> int:
    """Number of texts that belong to a scene; the others stand behind them."""
    return int(np.count_nonzero(text_scene >= 0))


_PAGE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^?#]*)")
"""Host and path of a URL. `urllib` refuses some of what stands in such columns, and its rules change between releases."""


def _alt_similarity(ordered: _Ordered, rows: slice, reason: NDArray[np.object_], config: CleanConfig) -> float | None:
    """Mean Jaccard similarity of the alt texts' words over all pairs of pages; None when there are too few pages.

    One alt text a page, the first: the same page crawled twice, or with another query string, says nothing new.
    """
    uris = column(ordered.records, "image_uri")[rows.start : rows.stop].to_pylist()
    pages: dict[str, int] = {}
    for place, uri in enumerate(uris):
        if uri is not None:
            match = _PAGE.match(uri)
            pages.setdefault(match[1] if match else uri, rows.start + place)
    if len(pages) < config.placeholder_urls:
        return None
    roles, raw = column(ordered.texts, "role"), column(ordered.texts, "text")
    words: list[set[str]] = []
    for record in pages.values():
        low, high = np.searchsorted(ordered.text_record, [record, record + 1])
        for row in range(int(low), int(high)):
            if roles[row].as_py() == "alt" and reason[row] is None:
                words.append(set(normal_form(raw[row].as_py().decode("utf-8", "replace")).split()))
                break
    if len(words) < config.placeholder_urls:
        return None
    pairs = [len(words[i] & words[j]) / max(1, len(words[i] | words[j])) for i in range(len(words)) for j in range(i)]
    return sum(pairs) / len(pairs)


def _judge_repeats(
    raw: pa.LargeBinaryArray,
    cleaned: pa.LargeStringArray,
    sums: NDArray[np.uint64],
    text_scene: Ints,
    reason: NDArray[np.object_],
) -> None:
    """Within a scene: the same raw text is `exact_repeat`, the same words are `normalised_repeat`; the first stays."""
    live = np.flatnonzero(is_none(reason) & (text_scene >= 0))
    if len(live) < 2:
        return
    order = live[np.lexsort((live, sums[live], text_scene[live]))]
    same = (text_scene[order[1:]] == text_scene[order[:-1]]) & (sums[order[1:]] == sums[order[:-1]])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2).tolist():
        rows: Sequence[int] = order[first : last + 1].tolist()
        seen_raw: set[bytes] = set()
        seen_words: set[str] = set()
        for row in rows:
            text, exact = cleaned[row].as_py(), raw[row].as_py()
            words = normal_form(text) or text  # a text of signs only stands for itself
            if exact in seen_raw:
                reason[row] = "exact_repeat"
            elif words in seen_words:
                reason[row] = "normalised_repeat"
            seen_raw.add(exact)
            seen_words.add(words)


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(column(table, name), np.int64)
