"""What the id of a scene names outside its own dataset, source by source.

Invariant: two ids have one identity only when they name the same thing. An id that is a position (a row of a file, a
number of a random draw, the key of a download) has none; and `sql_identity` equals `identity` for every id.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from catalog.lake.lake import quote

Rules: TypeAlias = tuple[tuple[str, str | None], ...]
"""(pattern of the whole id, namespace); the first match decides, its first group is the name. None: no identity."""

_ANY: Final = r"(?s:(.*))"
_FLICKR_STEM: Final = r"([0-9]{5,})(?:_[0-9a-f]+)?"

# Flickr8k writes 1000268201_693b08cb0e.jpg (number and secret of the photo), Flickr30k 1000268201.jpg, Multi30k
# 1000268201.
_FLICKR: Final[Rules] = ((_FLICKR_STEM + r"(?:\.(?:jpe?g|JPE?G))?", "flickr"), (_ANY, "flickr"))
# Other ids of crawled sets are rows or keys of one download (UCSC-VLAA/Recap-DataComp-1B#11).
NO_BYTES: Final = hashlib.sha256().hexdigest()
"sha256 of an empty download."

_WEB: Final[Rules] = (
    (f"({NO_BYTES})", None),
    (r"([0-9a-f]{64})", "sha256"),
    (r"([0-9a-f]{32})", "uid"),  # of DataComp
    (r"((?s:[A-Za-z][A-Za-z0-9+.-]*://.*))", "url"),
    (_ANY, None),
)

NAMESPACES: Final[Mapping[str, Rules]] = {
    "flickr8k": _FLICKR,
    "flickr30k": _FLICKR,
    "multi30k": _FLICKR,
    "coco": ((_ANY, "coco"),),
    "msrvtt": ((_ANY, "msrvtt"),),
    "recap-datacomp": _WEB,
    "datacomp": _WEB,
    "img2dataset": _WEB,
    "webdataset": _WEB,
    # Ids of a user's own table: 7 in one table is not 7 in another.
    "table": _WEB,
    # Numbers of random draws: another seed gives them to other scenes.
    "toyworld": ((_ANY, None),),
}
"""Kind of source -> rules. Ids of a source that is not listed are valid among datasets of that source."""

# Files in COCO's layout hold other pictures too: Karpathy's hold photos of Flickr (36979 is a photo there and another
# one in COCO), and users number theirs from 0. The file name decides: COCO's has 12 digits, which are the id.
_COCO_SOURCE: Final = "coco"
_PICTURE: Final = re.compile(r"(?:.*/)?" + _FLICKR_STEM + r"\.jpg", re.DOTALL)
_COCO_PICTURE: Final = re.compile(r"(?:.*/)?(?:COCO_[a-z]+[0-9]{4}_)?([0-9]{12})\.jpg", re.DOTALL)

KEY_BYTES: Final = 16

SET_MIN: Final = 2
"Least number of distinct captions whose set identifies a scene."


def identity(source: str | None, source_id: str, *, address: str, image_uri: str | None = None) -> str | None:
    """`namespace:name` of a scene; None when its id names nothing outside its dataset.

    source: kind of source, None if unknown. address: `<source_uri>#<source_row>`. image_uri: of the first image.
    """
    if source is None or source_id == address:
        return None
    if source == _COCO_SOURCE:
        if image_uri and _is_flickr_picture(source_id, image_uri):
            source = "flickr30k"
        elif not image_uri or not _is_coco_picture(source_id, image_uri):
            return None
    for pattern, namespace in _rules(source):
        if match := pattern.fullmatch(source_id):
            return None if namespace is None else f"{namespace}:{match[1]}"
    return None


def _is_flickr_picture(source_id: str, image_uri: str) -> bool:
    if not _PICTURE.fullmatch(image_uri) or _COCO_PICTURE.fullmatch(image_uri):
        return False
    return image_uri.rsplit("/", 1)[-1] == f"{source_id}.jpg"


def _is_coco_picture(source_id: str, image_uri: str) -> bool:
    match = _COCO_PICTURE.fullmatch(image_uri)
    return match is not None and str(int(match[1])) == source_id


@functools.cache
def _rules(source: str) -> tuple[tuple[re.Pattern[str], str | None], ...]:
    rules = NAMESPACES.get(source, ((_ANY, source),))
    return tuple((re.compile(pattern), namespace) for pattern, namespace in rules)


def sql_identity(source: str | None, row: str) -> str:
    """A DuckDB expression for `identity` of a row of `versions.scenes`, which is known in the query as `row`."""
    if source is None:
        return "NULL::VARCHAR"
    id_, uri = f"{row}.source_id", f"{row}.images[1].uri"
    named = _sql_rules(source, id_)
    if source == _COCO_SOURCE:
        is_flickr = (
            f"regexp_full_match({uri}, {quote(_sql(_PICTURE))})"
            f" AND NOT regexp_full_match({uri}, {quote(_sql(_COCO_PICTURE))})"
            f" AND parse_filename({uri}, false, 'forward_slash') = {id_} || '.jpg'"
        )
        number = f"regexp_extract({uri}, {quote(f'^{_sql(_COCO_PICTURE)}$')}, 1)"
        is_coco = f"try_cast({number} AS BIGINT)::VARCHAR = {id_}"
        named = (
            f"CASE WHEN coalesce({is_flickr}, false) THEN {_sql_rules('flickr30k', id_)}"
            f" WHEN coalesce({is_coco}, false) THEN {named} END"
        )
    return f"CASE WHEN {id_} = {row}.source_uri || '#' || {row}.source_row THEN NULL ELSE {named} END"


def _sql_rules(source: str, column: str) -> str:
    cases = []
    for pattern, namespace in _rules(source):
        name = (
            "NULL"
            if namespace is None
            else f"{quote(namespace + ':')} || regexp_extract({column}, {quote(f'^(?:{pattern.pattern})$')}, 1)"
        )
        cases.append(f"WHEN regexp_full_match({column}, {quote(pattern.pattern)}) THEN {name}")
    return f"(CASE {' '.join(cases)} ELSE NULL END)"


def _sql(pattern: re.Pattern[str]) -> str:
    return f"(?s:{pattern.pattern})" if pattern.flags & re.DOTALL else pattern.pattern


# --- keys ---------------------------------------------------------------------------------------------------------


def key(kind: str, value: str) -> bytes:
    """16 bytes for a value of one kind (`id`, `sha256`, `captions`, `caption_set`): its md5, which DuckDB has too."""
    return hashlib.md5(f"{kind}:{value}".encode(), usedforsecurity=False).digest()


def sql_key(kind: str, expression: str) -> str:
    """A DuckDB expression for `key` of a text expression, as a BLOB."""
    return f"unhex(md5({quote(kind + ':')} || {expression}))"


def caption_set(forms: Iterable[str]) -> str | None:
    """Digest of the set of normal forms of a scene's captions, in any order; None for fewer than `SET_MIN` forms.

    A single caption (`a dog runs`) does not identify a scene; equal whole sets are rarely a coincidence. Empty and
    repeated forms do not count.
    """
    distinct = {form for form in forms if form}
    if len(distinct) < SET_MIN:
        return None
    total = 0
    for form in distinct:
        total ^= int.from_bytes(hashlib.md5(form.encode(), usedforsecurity=False).digest(), "little")
    return f"{total >> 64}:{total & (1 << 64) - 1}"


def sql_caption_set(form: str) -> str:
    """An aggregate over the distinct, non-empty normal forms of one scene that equals `caption_set`."""
    total, low = f"bit_xor(md5_number({form}))", (1 << 64) - 1
    # In two halves: DuckDB formats a 128-bit number in 200 microseconds, and a 64-bit number in less than one.
    text = f"({total} >> 64)::UBIGINT || ':' || ({total} & {low}::UHUGEINT)::UBIGINT"
    return f"CASE WHEN count(*) >= {SET_MIN} THEN {text} END"
