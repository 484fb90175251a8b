"""The options of an ingestion, and the digest that names its version.

Invariant: CPUs, absolute paths, the order of inputs, budgets and the clock are in no version.
"""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from catalog.manifest import InputFile
from catalog.overlap import exclusion
from catalog.overlap.parts import Part
from infra import config as configuration
from infra import storage
from infra.errors import ConfigError
from infra.session import Workers
from pipelines.ingest import tars
from pipelines.ingest.clean import TRANSFORM_VERSION, CleanConfig
from pipelines.ingest.exclusion import ExcludeConfig
from pipelines.records import Input, Source, Survey

VIEWS = ("good", "bad")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Content options of an ingestion besides those of its source; all are part of the version."""

    clean: CleanConfig = field(default_factory=CleanConfig)
    scenes_per_shard: int = 10_000
    "A shard is the unit of work, of retry and of memory."
    views: str = "good,bad"
    "Which view tars are written: `good`, `bad`, both, or none (empty)."
    images: bool = True
    "Put the pictures that the source carries into the good tars."
    seed: int = 0
    "Root seed of the caption permutations of the bad views."
    limit: int | None = None
    "At most so many rows of the input (images, scenes), in canonical order."
    exclude: ExcludeConfig = field(default_factory=ExcludeConfig)
    max_scenes_per_caption: int | None = None
    "A caption, case and punctuation aside, stands under at most so many scenes; None: no cap."

    def __post_init__(self) -> None:
        if self.scenes_per_shard < 1:
            raise ConfigError(
                f"scenes_per_shard is {self.scenes_per_shard}; a shard holds at least 1 scene. About 10,000 is a good "
                "size."
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; nothing would be read. Use 1 or more, or leave it out.")
        if self.max_scenes_per_caption is not None and self.max_scenes_per_caption < 1:
            raise ConfigError(
                f"max_scenes_per_caption is {self.max_scenes_per_caption}; use 1 or more, or leave it out for no cap."
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; use 0 or more.")
        unknown = sorted(set(self.view_names) - set(VIEWS))
        if unknown:
            raise ConfigError(f"views names {unknown[0]!r}; known are {' and '.join(VIEWS)}, separated by a comma.")

    @property
    def view_names(self) -> tuple[str, ...]:
        """The names in `views`, sorted."""
        return tuple(sorted({name.strip() for name in self.views.split(",") if name.strip()}))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One ingestion. `max_reject_rate` is a budget, so it is not part of the version.

    excluded: the parts that `config.exclude` names, at the versions that were current when the job began.
    """

    dataset: str
    source: Source
    config: IngestConfig
    inputs: Sequence[Input]
    max_reject_rate: float = 0.2
    excluded: tuple[Part, ...] = ()


def content_of(request: Request) -> dict[str, Any]:
    """Everything besides the input files that decides the bytes of a version."""
    config, source = request.config, request.source
    return {
        "source": source.name,
        "options": configuration.to_dict(source),
        "clean": configuration.to_dict(config.clean),
        "scenes_per_shard": config.scenes_per_shard,
        "views": list(config.view_names),
        "bad_passes": source.bad_passes,
        "images": config.images,
        "seed": config.seed,
        "limit": config.limit,
        "transform": TRANSFORM_VERSION,
        # Another release of these may write other bytes for equal content, so it makes another version.
        "writers": {
            "pyarrow": pa.__version__,
            "tar": tars.LAYOUT_VERSION,
            "unicode": unicodedata.unidata_version,
            **source.writers,
        },
        **_optional(request),
    }


def _optional(request: Request) -> dict[str, Any]:
    """Content that is present only where it is used, so that versions without it keep their names."""
    content: dict[str, Any] = {}
    if request.excluded:
        content["exclude"] = {
            "sets": [{"dataset": p.dataset, "version": p.version, "split": p.split} for p in request.excluded],
            "by": list(request.config.exclude.kinds),
            "rules": exclusion.RULES,
        }
    if request.config.max_scenes_per_caption is not None:
        content["max_scenes_per_caption"] = request.config.max_scenes_per_caption
    return content


def version_of(dataset: str, content: Mapping[str, Any], inputs: Sequence[InputFile]) -> str:
    """16 hex digits of sha256 over dataset name, content options and input digests."""
    record = {"dataset": dataset, "content": content, "inputs": sorted((i.uri, i.bytes, i.sha256) for i in inputs)}
    return hashlib.sha256(orjson.dumps(record, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def input_files(survey: Survey) -> list[Input]:
    """Every file that is read, by uri; other files have no effect on the version."""
    read = {file.uri: file for piece in survey.pieces if piece.input is not None for file in piece.input.files}
    return [read[uri] for uri in sorted(read)]


def digest_inputs(files: Sequence[Input], workers: Workers) -> list[InputFile]:
    """Size and sha256 of each file, with a warning for two files of the same bytes: their rows are read twice."""
    records = dict(workers.map(storage.digest, [file.url for file in files]))
    digests = [InputFile(uri=f.uri, bytes=records[i].bytes, sha256=records[i].sha256) for i, f in enumerate(files)]
    first: dict[str, str] = {}
    for file in digests:
        if first.setdefault(file.sha256, file.uri) != file.uri:
            _log.warning(
                "%s and %s hold the same bytes, so each of their rows is read twice", first[file.sha256], file.uri
            )
    return digests
