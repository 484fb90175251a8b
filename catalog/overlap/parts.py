"""A part of the catalog: a dataset version, one of its splits, and how both are named.

Names are `DATASET[@VERSION][:SPLIT]`, or `/SPLIT`.
Invariant: a part that `resolve` returns holds at least one scene; the error for any other name lists the known ones.
"""

from __future__ import annotations

import re
from typing import Final

from catalog.lake.lake import Lake
from catalog.overlap.leakage import Part
from catalog.versions.current import find_version, listed
from infra.errors import InputError, UsageError

GRAMMAR: Final = "DATASET[@VERSION][:SPLIT]"

_NAME: Final = re.compile(r"(?P<dataset>[^@:/]+)(?:@(?P<version>[^@:/]+))?(?:[:/](?P<split>[^@:/]+))?")


def parse(text: str) -> tuple[str, str | None, str | None]:
    """(dataset, version, split) of a name; None for what it leaves out. Raises UsageError."""
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not {GRAMMAR}. For example `multi30k:test` or `multi30k@0123456789abcdef:test`.")
    return match["dataset"], match["version"], match["split"]


def resolve(reader: Lake, text: str) -> Part:
    """The part of the catalog that the name means; without a version, of the current one.

    Raises UsageError for another grammar, InputError for a dataset, version or split that the catalog does not hold.
    """
    dataset, version, split = parse(text)
    version = find_version(reader, dataset, version).version
    query = "SELECT DISTINCT split FROM versions.shards WHERE dataset = ? AND version = ? AND scenes > 0 ORDER BY split"
    splits = [str(row[0]) for row in reader.rows(query, [dataset, version])]
    if not splits:
        raise InputError(f"{dataset}@{version} holds no scene, so nothing can be found in it.")
    if split is not None and split not in splits:
        raise InputError(f"{dataset}@{version} has no split {split!r}. It has {listed(splits)}.")
    return Part(dataset=dataset, version=version, split=split)
