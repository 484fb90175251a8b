"""A part of the catalog: a dataset version, one of its splits, and how both are named.

Names are `DATASET[@VERSION][:SPLIT]`, or `/SPLIT`.
Invariant: a part that `resolve` returns holds at least one scene; the error for any other name lists the known ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from catalog.lake.lake import Lake
from catalog.versions.current import find_version, listed
from infra.errors import InputError, UsageError

GRAMMAR: Final = "DATASET[@VERSION][:SPLIT]"

_NAME: Final = re.compile(r"(?P<dataset>[^@:/]+)(?:@(?P<version>[^@:/]+))?(?:[:/](?P<split>[^@:/]+))?")


WHERE: Final = "s.dataset = ? AND s.version = ? AND (? IS NULL OR s.split = ?)"
"Selects the rows `s` of a part; bind `Part.values`."


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a dataset version. split: None for all. roles: empty for all."""

    dataset: str
    version: str
    split: str | None = None
    roles: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`dataset@version/split`."""
        return f"{self.dataset}@{self.version}" + (f"/{self.split}" if self.split else "")

    @property
    def values(self) -> list[object]:
        """Values for `WHERE`."""
        return [self.dataset, self.version, self.split, self.split]


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


def source_of(reader: Lake, part: Part) -> str | None:
    """Kind of source of a part's dataset; None if unknown."""
    query = "SELECT source FROM main.datasets WHERE dataset = ? AND version = ?"
    rows = reader.rows(query, [part.dataset, part.version])
    return str(rows[0][0]) if rows and rows[0][0] is not None else None
