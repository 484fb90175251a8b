"""Group the records of one shard into scenes: canonical order, scene keys, and the rules for whole scenes.

Invariant: the result depends on the set of records, not on the order or the batches in which they came; every text is
either kept or has exactly one reason. R records, T texts, S scenes. The rule for one text is in `clean`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from catalog import schema
from catalog.wording import normal_form
from infra.errors import IntegrityError
from pipelines.arrays import Ints, column, is_none, run_lengths, run_starts
from pipelines.ingest.clean import CleanConfig, Cleaned, clean_texts
from pipelines.records import RECORDS, TEXTS, Batch


@dataclass(frozen=True)
class Ordered:
    """Records and texts in canonical order.

    record_scene (R,), text_scene (T,): scene of each record and text, ascending; -1 for records without an id, which
    come last. text_record (T,): record of each text.
    """

    records: pa.Table
    record_scene: Ints
    texts: pa.Table
    text_record: Ints
    text_scene: Ints


@dataclass(frozen=True)
class Scenes(Ordered):
    """Ordered records and texts, with the fate of each text.

    keys (S,): scene keys, ascending by bytes; may include scenes that keep no caption. text_index (T,): place of the
    text among all of its scene. reason (T,): None when kept.
    """

    keys: pa.LargeStringArray
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
    """Order the records of a shard, clean their texts, and give each text that is left out its reason.

    Raises IntegrityError when two source ids give one scene key.
    """
    keys, scene_of_record = _scene_of_records(column(batch.records, "source_id"))
    ordered = _ordered(batch, scene_of_record, scenes=len(keys))
    texts, text_scene = ordered.texts, ordered.text_scene
    cleaned = clean_texts(column(texts, "text"), repair=repair, entities=config.html_entities)
    reason, detail = cleaned.reason, cleaned.detail
    reason[text_scene < 0] = "missing_id"
    _reject_broken(texts, reason, detail)
    _reject_groups(ordered, reason, detail, config)
    if config.repeats:
        _reject_repeats(column(texts, "text"), cleaned, text_scene)
    starts = run_starts(text_scene)
    return Scenes(
        **vars(ordered),
        keys=keys,
        text_index=np.arange(len(text_scene)) - np.repeat(starts, run_lengths(starts, len(text_scene))),
        cleaned=cleaned.text,
        repaired=cleaned.repaired,
        reason=reason,
        detail=detail,
    )


def kept_forms(scenes: Scenes) -> tuple[Ints, list[str]]:
    """Rows and normal forms of the kept texts that have a normal form."""
    rows = np.flatnonzero(is_none(scenes.reason))
    forms = [normal_form(text) for text in scenes.cleaned.take(rows).to_pylist()]
    has_form = np.array([bool(form) for form in forms], np.bool_)
    return rows[has_form], [form for form in forms if form]


# --- order --------------------------------------------------------------------------------------------------------


def _ordered(batch: Batch, scene_of_record: Ints, *, scenes: int) -> Ordered:
    """Records by scene, file and row; texts by record, in the order that the record gives them.

    scene_of_record (R,): rank of the scene's key; `scenes`, which sorts last, for a record without an id.
    """
    order = np.lexsort((_ints(batch.records, "source_row"), _uri_ranks(batch.records), scene_of_record))
    record_scene = scene_of_record[order]
    record_scene[record_scene == scenes] = -1
    new_place = np.empty(len(order), np.int64)
    new_place[order] = np.arange(len(order))
    text_record = new_place[_ints(batch.texts, "record")]
    text_order = np.argsort(text_record, kind="stable")
    text_record = text_record[text_order]
    return Ordered(
        records=batch.records.take(pa.array(order)),
        record_scene=record_scene,
        texts=batch.texts.take(pa.array(text_order)),
        text_record=text_record,
        text_scene=record_scene[text_record],
    )


def _scene_of_records(source_id: pa.LargeStringArray) -> tuple[pa.LargeStringArray, Ints]:
    """Sorted scene keys (S,), and for each record the rank of its key, S if it has no id."""
    encoded = source_id.dictionary_encode()
    ids = encoded.dictionary
    keys, order = ordered_keys(ids, scene_keys(ids))
    rank = np.full(len(ids) + 1, len(ids), np.int64)
    rank[order] = np.arange(len(ids))
    return keys, rank[np.asarray(encoded.indices.fill_null(len(ids)), np.int64)]


def ordered_keys(ids: pa.LargeStringArray, keys: pa.LargeStringArray) -> tuple[pa.LargeStringArray, Ints]:
    """Keys in ascending order of their bytes, and the places they came from.

    Raises IntegrityError when two different ids have one key.
    """
    order = np.asarray(pc.sort_indices(keys), np.int64)
    ordered = keys.take(pa.array(order))
    same: Ints = np.flatnonzero(np.asarray(pc.equal(ordered[1:], ordered[:-1])))
    if len(same):
        first, second = sorted(ids[int(order[same[0] + i])].as_py() for i in (0, 1))
        raise IntegrityError(
            f"The source ids {first!r} and {second!r} give one scene key {ordered[int(same[0])].as_py()!r}. Two scenes "
            "would become one; rename one of the ids."
        )
    return ordered, order


def scene_keys(ids: pa.LargeStringArray) -> pa.LargeStringArray:
    """`catalog.schema.scene_key` for an array without nulls; only ids that are not legal keys go through Python."""
    legal = pc.and_not(
        pc.match_substring_regex(ids, f"^(?:{schema.KEY_PATTERN.pattern})\\z"),
        pc.starts_with(ids, schema.HASHED_PREFIX),
    )
    if pc.all(legal).as_py() is not False:
        return ids
    hashed = pa.array([schema.scene_key(i) for i in ids.filter(pc.invert(legal)).to_pylist()], pa.large_string())
    return pc.replace_with_mask(ids, pc.invert(legal), hashed)


def _uri_ranks(records: pa.Table) -> Ints:
    """Rank (R,) of the file of each record, because the codes of a dictionary depend on the batches it came in."""
    encoded = column(records, "source_uri")
    uris = encoded.dictionary.to_pylist()
    rank = np.empty(max(1, len(uris)), np.int64)
    rank[sorted(range(len(uris)), key=lambda i: uris[i])] = np.arange(len(uris))
    return rank[np.asarray(encoded.indices, np.int64)]


# --- texts that are left out --------------------------------------------------------------------------------------


def _reject_broken(texts: pa.Table, reason: NDArray[np.object_], detail: dict[int, str]) -> None:
    """Texts that their reader could not read."""
    broken = column(texts, "broken")
    if broken.null_count == len(broken):
        return
    for row in np.flatnonzero(np.asarray(broken.is_valid())).tolist():
        reason[row], _, detail[row] = broken[row].as_py().partition(": ")


def _reject_groups(ordered: Ordered, reason: NDArray[np.object_], detail: dict[int, str], config: CleanConfig) -> None:
    """Whole scenes: those of too many records, and those with one picture under unrelated descriptions."""
    record_scene, text_scene = ordered.record_scene, ordered.text_scene
    named = text_scene[text_scene >= 0]  # ascending, and a prefix of text_scene
    starts = run_starts(record_scene)
    counts = run_lengths(starts, len(record_scene))
    large = counts >= min(config.placeholder_urls, config.max_group_records + 1)
    for start, count in zip(starts[large].tolist(), counts[large].tolist(), strict=True):
        scene = int(record_scene[start])
        if scene < 0:
            continue
        # Counting the rows of frames costs a look at the records, which most groups do not need.
        samples = count if count <= config.max_group_records else _samples(ordered.records[start : start + count])
        if samples > config.max_group_records:
            why, what = "oversized_group", f"{samples} records, at most {config.max_group_records}"
        else:
            similarity = _alt_similarity(ordered, slice(start, start + count), reason, config)
            if similarity is None or similarity >= config.placeholder_similarity:
                continue
            why, what = "placeholder_group", f"mean word similarity {similarity:.3f} over {count} records"
        low, high = np.searchsorted(named, [scene, scene + 1])
        for row in range(int(low), int(high)):
            if reason[row] is None:
                reason[row], detail[row] = why, what


def _samples(records: pa.Table) -> int:
    """Number of input rows among the records of a scene: the frames of one row count once."""
    return len(run_starts(np.stack([_uri_ranks(records), _ints(records, "source_row")], axis=1)))


_PAGE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^?#]*)")
"""Host and path of a URL. `urllib` refuses some real values, and its rules change between releases."""


def _alt_similarity(ordered: Ordered, rows: slice, reason: NDArray[np.object_], config: CleanConfig) -> float | None:
    """Mean Jaccard similarity of the alt texts' words over all pairs of pages; None when there are too few pages.

    Only the first alt text of a page counts: the same page with another query string is not independent of it.
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


def _reject_repeats(raw: pa.LargeBinaryArray, cleaned: Cleaned, text_scene: Ints) -> None:
    """Within a scene: the same raw text is `exact_repeat`, the same words are `normalised_repeat`; the first stays."""
    sums, reason = cleaned.sums, cleaned.reason
    live = np.flatnonzero(is_none(reason) & (text_scene >= 0))
    if len(live) < 2:
        return
    # Texts of one normal form have one sum, so only runs of equal scene and sum are compared as strings.
    order = live[np.lexsort((live, sums[live], text_scene[live]))]
    same = (text_scene[order[1:]] == text_scene[order[:-1]]) & (sums[order[1:]] == sums[order[:-1]])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2).tolist():
        seen_raw: set[bytes] = set()
        seen_words: set[str] = set()
        for row in order[first : last + 1].tolist():
            text, exact = cleaned.text[row].as_py(), raw[row].as_py()
            words = normal_form(text) or text  # a text of signs has no normal form and repeats only itself
            if exact in seen_raw:
                reason[row] = "exact_repeat"
            elif words in seen_words:
                reason[row] = "normalised_repeat"
            seen_raw.add(exact)
            seen_words.add(words)


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(column(table, name), np.int64)
