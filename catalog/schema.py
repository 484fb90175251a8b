"""The schemas and names that the stages share: columns, key grammar, roles, splits, paths.

Invariant: our files have exactly the schemas declared here, empty and all-null columns included. Text is `large_string`
and every count or offset is 64-bit, because 940 million scenes of three texts exceed 2^31.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import pyarrow as pa

KEY_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
HASHED_PREFIX: Final = "h-"
_READ_BACK: Final = re.compile(r"scene_key:(h-[0-9a-f]{32})")

ROLES: Final = ("human", "alt", "recap", "recap_conditioned", "paraphrase")
SPLIT_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")
DATASET_PATTERN: Final = KEY_PATTERN

REJECT_REASONS: Final = {
    "missing_text": "the field is null, empty, white space only, or one of nan, None, null",
    "missing_id": "the record names no scene",
    "invalid_utf8": "the bytes are not UTF-8; the offset of the first bad byte is in `detail`",
    "broken_picture": "the caption describes a picture that did not load",
    "oversized_group": "the scene has more records than `clean.max_group_records`",
    "placeholder_group": "one image hash under several URLs with unrelated alt texts: a 'not available' picture",
    "exact_repeat": "the same raw text stands earlier in the same scene",
    "normalised_repeat": "the same words stand earlier in the same scene, case and punctuation aside",
    "malformed_record": "the record does not parse; `detail` says why",
    "missing_image": "the caption names an image that the file does not list",
    "broken_image": "the picture cannot be decoded whole; `detail` says why, with its bytes and pixels",
    "oversized_image": "the picture has more bytes or pixels than are decoded; both are in `detail`",
    "image_without_caption": "the picture is whole, but its scene keeps no caption",
    "excluded": "the scene is in a set named by --exclude; set and kind of match are in `detail`",
    "common_caption": "more scenes than --max-scenes-per-caption have these words, and others keep them",
}

CAPTION: Final = pa.struct(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("role", pa.large_string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("repaired", pa.bool_(), nullable=False),
    ]
)
IMAGE: Final = pa.struct(
    [
        pa.field("uri", pa.large_string()),
        pa.field("sha256", pa.large_string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frame", pa.int32()),
    ]
)

SCENES: Final = pa.schema(
    [
        pa.field("dataset", pa.large_string(), nullable=False),
        pa.field("version", pa.large_string(), nullable=False),
        pa.field("scene_key", pa.large_string(), nullable=False),
        pa.field("split", pa.large_string(), nullable=False),
        pa.field("captions", pa.large_list(pa.field("element", CAPTION, nullable=False)), nullable=False),
        pa.field("images", pa.large_list(pa.field("element", IMAGE, nullable=False)), nullable=False),
        pa.field("source_id", pa.large_string(), nullable=False),
        pa.field("source_uri", pa.large_string(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
    ]
)
"""One row a scene, sorted by scene_key within a shard. `source_uri`, `source_row`: its first record, row 0-based."""

REJECTS: Final = pa.schema(
    [
        pa.field("dataset", pa.large_string(), nullable=False),
        pa.field("version", pa.large_string(), nullable=False),
        pa.field("shard", pa.int64(), nullable=False),
        pa.field("split", pa.large_string(), nullable=False),
        pa.field("reason", pa.large_string(), nullable=False),
        pa.field("detail", pa.large_string()),
        pa.field("scene_key", pa.large_string()),
        pa.field("field", pa.large_string(), nullable=False),
        pa.field("text", pa.large_string()),
        pa.field("raw", pa.large_binary()),
        pa.field("source_id", pa.large_string()),
        pa.field("source_uri", pa.large_string(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
    ]
)
"""One row a text that was not kept: `text` as read (bytes outside UTF-8 as `\\xNN`, then the exact bytes in `raw`).

And one row a picture that was not kept, after those of the texts, without its bytes: `broken_image`, `oversized_image`,
`image_without_caption`, or `missing_id` where its record names no scene. `field` is its column or member.
"""

STATES: Final = pa.schema(
    [
        pa.field("dataset", pa.large_string(), nullable=False),
        pa.field("version", pa.large_string(), nullable=False),
        pa.field("scene_key", pa.large_string(), nullable=False),
        pa.field("split", pa.large_string(), nullable=False),
        pa.field("state", pa.large_string(), nullable=False),
    ]
)
"""The true state of a scene, as JSON with sorted keys, for sources that know it (`toyworld`)."""

SCHEMAS: Final = {"scenes": SCENES, "rejects": REJECTS, "states": STATES}
"""Kinds of parquet file that a shard publishes and the catalog registers."""


def scene_key(source_id: str) -> str:
    """The source's own id when it is a legal key, else `h-` and 32 hex digits of its sha256.

    An id that starts with `h-` is hashed too, so that no id can pass for the hash of another. Only an id in the form of
    `read_back` gives back the key it contains.
    """
    if match := _READ_BACK.fullmatch(source_id):
        return match[1]
    if KEY_PATTERN.fullmatch(source_id) and not source_id.startswith(HASHED_PREFIX):
        return source_id
    return HASHED_PREFIX + hashlib.sha256(source_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_back(scene_key: str) -> str:
    """The source id by which a scene of our own view tars, which hold its key alone, gets the same key again."""
    return f"scene_key:{scene_key}" if _READ_BACK.fullmatch(f"scene_key:{scene_key}") else scene_key


def shard_name(split: str, shard: int) -> str:
    """`train-00042`; numbers are unique over all splits of a version."""
    return f"{split}-{shard:05d}"


def scenes_path(split: str, shard: int) -> str:
    """Path inside a version of the shard's scenes."""
    return f"scenes/{split}/{shard:05d}.parquet"


def states_path(split: str, shard: int) -> str:
    """Path inside a version of the shard's true states."""
    return f"states/{split}/{shard:05d}.parquet"


def rejects_path(shard: int) -> str:
    """Path inside a version of the shard's rejects."""
    return f"rejects/{shard:05d}.parquet"


def good_path(split: str, shard: int) -> str:
    """Path inside a version of the shard's good view tar."""
    return f"views/good/{shard_name(split, shard)}.tar"


def bad_path(split: str, shard: int, bad_pass: int) -> str:
    """Path inside a version of one pass of the shard's bad view tars."""
    return f"views/bad/pass-{bad_pass:02d}/{shard_name(split, shard)}.tar"


def manifest_path(split: str, shard: int) -> str:
    """Path inside a version of the manifest, whose presence is the publication of the shard."""
    return f"manifests/{shard_name(split, shard)}.json"


JOB_PATH: Final = "job.json"
"""Path inside a version of the job record: config, inputs, shards and totals; written after the last manifest."""

CURRENT_PATH: Final = "current.json"
"""Path inside a dataset folder of the pointer `{"version": ...}` to the version that plain SQL names show."""
