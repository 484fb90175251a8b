"""Which embedding sets are of one space: a cosine between vectors of two spaces is a number that means nothing.

Owns: the identity of a space, told by digests. Does not own: maps between spaces (`indexing.rotate.rotation`).
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
            _log.warning(
                "Whether %r and %r are of one space is not known, since an import does not say which model made it.",
                base.name,
                queries.name,
            )
    elif one != two:
        differ = " and ".join(name for name in one if one[name] != two[name])
        message = f"{base.name!r} ({base.model}) and {queries.name!r} ({queries.model}) differ in {differ}, so a cosine between them means nothing. Embed both with one model, or fit a map with `goodviews rotate`."
        raise InputError(message)


def space_of(record: EmbeddingRecord) -> Mapping[str, Any] | None:
    """What decides the space of a set beside the layer; None for an import, which does not say."""
    content = record.config.get("content", {})
    if "weights" not in content:
        return None
    # The first and last layer of a model may have as many dims, and its towers too; other tokens are other inputs.
    return {
        "weights": content["weights"],
        "tokenizer": content.get("tokenizer"),
        "pooling": record.pooling,
        "modality": content["facts"]["modality"],
    }


def differing(one: EmbeddingRecord, other: EmbeddingRecord) -> list[str]:
    """In what the spaces of two sets differ; empty for one space.

    Of imports nothing but the label is known. A label alone proves nothing elsewhere: a run exports again, a folder is
    written over.
    """
    return differing_facts(one.model, space_of(one), other)


def differing_facts(model: str, space: Mapping[str, Any] | None, other: EmbeddingRecord) -> list[str]:
    """The same for a label and a space that were written down."""
    theirs = space_of(other)
    if (space is None) != (theirs is None):
        return [ORIGIN]
    if space is None or theirs is None:
        return [] if model == other.model else ["model"]
    return [name for name in theirs if space.get(name) != theirs[name]]
