"""The space of an embedding set, known by digests of its model: a cosine of vectors of two spaces means nothing.

Invariant: equal dims are never taken for an equal space.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from catalog.rows.embeddings import EmbeddingRecord
from infra.errors import InputError

ORIGIN: Final = "origin (one was imported, so its weights are not known)"
_log = logging.getLogger(__name__)


def check_same_space(base: EmbeddingRecord, queries: EmbeddingRecord) -> None:
    """Raises InputError when the two sets are known to be of different spaces."""
    one, two = space_of(base), space_of(queries)
    if one is None or two is None:
        if base.model != queries.model:
            message = (
                "Whether %r and %r are of one space is not known, since an import does not say which model made it."
            )
            _log.warning(message, base.name, queries.name)
    elif one != two:
        differ = " and ".join(name for name in one if one[name] != two[name])
        raise InputError(
            f"{base.name!r} ({base.model}) and {queries.name!r} ({queries.model}) differ in {differ}, so a cosine "
            "between them means nothing. Embed both with one model, or fit a map with `goodviews rotate`."
        )


def space_of(record: EmbeddingRecord) -> Mapping[str, Any] | None:
    """All that decides the space of a set, beside the layer; None for an import, whose model is not known."""
    content = record.config.get("content", {})
    if "weights" not in content:
        return None
    # Two layers or towers of a model may have equal dims; another tokenizer gives the model another input.
    return {
        "weights": content["weights"],
        "tokenizer": content.get("tokenizer"),
        "pooling": record.pooling,
        "modality": content["facts"]["modality"],
    }


def differing(one: EmbeddingRecord, other: EmbeddingRecord) -> list[str]:
    """The facts in which the spaces of two sets differ; empty for one space.

    Imports are compared by the label of their model, since no more is known. Elsewhere a label proves nothing: a run
    may export again, and a folder may be overwritten.
    """
    return differing_facts(one.model, space_of(one), other)


def differing_facts(model: str, space: Mapping[str, Any] | None, other: EmbeddingRecord) -> list[str]:
    """The same for a recorded label and space."""
    theirs = space_of(other)
    if (space is None) != (theirs is None):
        return [ORIGIN]
    if space is None or theirs is None:
        return [] if model == other.model else ["model"]
    return [name for name in theirs if space.get(name) != theirs[name]]
