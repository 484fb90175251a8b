"""Which embedding sets are of one space: a cosine between vectors of two spaces is a number that means nothing.

Owns: the identity of a space, told by digests. Does not own: maps between spaces (`indexing.rotation`).
Invariant: equal dims are never taken for an equal space.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from catalog.embeddings import EmbeddingRecord
from infra.errors import InputError

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
    # The first and last layer of a model may have as many dims, and its towers too.
    return {"weights": content["weights"], "pooling": record.pooling, "modality": content["facts"]["modality"]}
