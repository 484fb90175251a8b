"""Shard manifests and job records, from which the catalog can be rebuilt.

Invariant: the same version gives the same bytes, so they hold no time, host, path or worker count.
Renaming `manifests/<split>-<shard>.json` into place publishes a shard; renaming `job.json` publishes the version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import orjson

from infra.errors import IntegrityError

FORMAT = "goodviews-manifest-1"
JOB_FORMAT = "goodviews-job-1"
PICTURE_COUNTS = ("pictures_read", "pictures_kept", "pictures_rejected")


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
    pictures_read: int | None = None
    "None: no picture was counted, or an older release wrote the manifest. Then the three keys are not in the JSON."
    pictures_kept: int | None = None
    "Whole pictures of the scenes that are kept."
    pictures_rejected: Mapping[str, int] | None = None
    "Count by reason. They are rows of the rejects, but not in `rejects`, which counts texts."
    files: list[ShardFile] = field(default_factory=list)

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, one line."""
        return orjson.dumps(_known(self), option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)

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
    pictures_read: int | None = None
    "The sums over the manifests that count pictures; None and not in the JSON when none does."
    pictures_kept: int | None = None
    pictures_rejected: Mapping[str, int] | None = None

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, indented for people."""
        options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps(_known(self), option=options)

    @staticmethod
    def from_json(data: bytes, *, url: str) -> JobRecord:
        """Raises IntegrityError when the bytes are not a job record of a format this release reads."""
        record = _loads(data, url=url, expected=JOB_FORMAT)
        record["inputs"] = [InputFile(**f) for f in record["inputs"]]
        return JobRecord(**record)


class CountsPictures(Protocol):
    """A manifest, or the totals of one."""

    @property
    def pictures_read(self) -> int | None: ...
    @property
    def pictures_kept(self) -> int | None: ...
    @property
    def pictures_rejected(self) -> Mapping[str, int] | None: ...


def picture_totals(parts: Sequence[CountsPictures]) -> dict[str, Any]:
    """`pictures_read`, `pictures_kept` and `pictures_rejected` over the manifests that count pictures; else None."""
    counted = [part for part in parts if part.pictures_read is not None]
    if not counted:
        return dict.fromkeys(PICTURE_COUNTS)
    rejected: Counter[str] = Counter()
    for part in counted:
        rejected.update(part.pictures_rejected or {})
    return {
        "pictures_read": sum(part.pictures_read or 0 for part in counted),
        "pictures_kept": sum(part.pictures_kept or 0 for part in counted),
        "pictures_rejected": dict(sorted(rejected.items())),
    }


def _known(record: Manifest | JobRecord) -> dict[str, Any]:
    """The fields of a record, without the counts of pictures where none were counted."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value for name, value in found.items() if name not in PICTURE_COUNTS or value is not None}


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
