"""Shard manifests and job records, from which the catalog can be rebuilt.

Invariant: the same version gives the same bytes, so they hold no time, host, path or worker count.
Renaming `manifests/<split>-<shard>.json` into place publishes a shard; renaming `job.json` publishes the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from infra.errors import IntegrityError

FORMAT = "goodviews-manifest-1"
JOB_FORMAT = "goodviews-job-1"


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One file of a shard. `kind`: scenes, rejects, states, good, bad."""

    path: str
    "Relative to the folder of the version."
    kind: str
    bytes: int
    sha256: str
    rows: int
    "Parquet rows, or samples of a tar."
    blocks: list[int] | None = None
    "Tars only: length of each sample (headers, payloads, padding) in 512-byte blocks, in order; offsets are its sums."
    bad_pass: int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one shard holds. Counts are exact; `rows_digest` depends on the rows, not on the parquet writer."""

    format: str = FORMAT
    dataset: str
    version: str
    split: str
    shard: int
    seed: int
    "Root seed of the caption permutations."
    scenes: int
    captions: int
    texts_read: int
    texts_kept: int
    rejects: Mapping[str, int]
    "Count by reason."
    repaired: int
    "Kept texts whose literal byte escapes were undone."
    captions_per_scene: Mapping[str, int]
    "Number of scenes by number of captions (the key is a decimal number)."
    bad_passes: int
    bad_repeats: int
    "Samples of the bad passes that show a caption again, because the scene has fewer captions than passes."
    rows_digest: str
    scenes_without_caption: int = 0
    "Scenes of the input that keep no caption and so are not among `scenes`; their texts are rejects."
    files: list[ShardFile] = field(default_factory=list)

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, one line."""
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)

    @staticmethod
    def from_json(data: bytes, *, url: str) -> Manifest:
        """Raises IntegrityError when the bytes are not a manifest of a format this release reads."""
        record = _loads(data, url=url, expected=FORMAT)
        record["files"] = [ShardFile(**f) for f in record["files"]]
        return Manifest(**record)


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input: `uri` relative to the input root."""

    uri: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What decided a version, and its totals; the first four fields are what the version is a digest of."""

    format: str = JOB_FORMAT
    dataset: str
    version: str
    content: Mapping[str, Any]
    "Source, source options, cleaning, views, scenes per shard, seed, limit, versions of transform and writers."
    inputs: list[InputFile]
    shards: list[str]
    "Names of the manifests (`train-00000`), sorted by shard number."
    scenes: int
    captions: int
    texts_read: int
    texts_kept: int
    rejects: Mapping[str, int]

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, indented for people."""
        options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps(self, option=options)

    @staticmethod
    def from_json(data: bytes, *, url: str) -> JobRecord:
        """Raises IntegrityError when the bytes are not a job record of a format this release reads."""
        record = _loads(data, url=url, expected=JOB_FORMAT)
        record["inputs"] = [InputFile(**f) for f in record["inputs"]]
        return JobRecord(**record)


def _loads(data: bytes, *, url: str, expected: str) -> dict[str, Any]:
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(
            f"{url} is not JSON ({error}). It was changed after publication; delete it and rerun `goodviews ingest`."
        ) from error
    if not isinstance(record, dict) or record.get("format") != expected:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        message = (
            f"{url} has format {found!r}, this release reads {expected!r}. Use the release of goodviews that wrote it."
        )
        raise IntegrityError(message)
    return record
