"""Samples of a tar: adjacent members with one key, by webdataset's rule.

The rule: a name is split at the FIRST dot of its last component. Folders, with their dots, belong to the key; the
suffix is lower-cased. So `train.v1/0001.seg.png` has the key `train.v1/0001` and the suffix `seg.png`.
Invariant: a sample is complete. One key in two places of a tar, which webdataset reads as two incomplete samples, is an
InputError (webdataset#407).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Final, TypeAlias

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.tar_members import FILE, FOLDER, Member, members, payload

Wants: TypeAlias = Callable[[str, str, int], bool]
"""(key, suffix, bytes) of a member -> whether its payload is read."""

_META = re.compile(r"__[^/]*__(?:$|/)")
"""Names that webdataset passes over."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. row: its place in the tar, from 0. members, data: by suffix in the order of the tar; data: if read"""

    key: str
    row: int
    offset: int
    members: Mapping[str, Member]
    data: Mapping[str, bytes]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.members


@dataclass(kw_only=True)
class Tally:
    """Counts of a scan: samples, members by suffix, and entries that belong to no sample by their kind."""

    samples: int = 0
    suffixes: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)

    def count(self, suffixes: Iterable[str]) -> None:
        """Count a sample with these members."""
        self.samples += 1
        self.suffixes.update(suffixes)

    def __add__(self, other: Tally) -> Tally:
        """The counts of two scans together."""
        return Tally(
            samples=self.samples + other.samples,
            suffixes=self.suffixes + other.suffixes,
            passed=self.passed + other.passed,
        )


def split_name(name: str) -> tuple[str, str] | None:
    """(key, lower-case suffix) of a member; None where webdataset sees none, and for hidden files (`._0001.jpg`)."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not stem or not dot or _META.match(name):
        return None
    return folder + slash + stem, suffix.lower()


def nothing(key: str, suffix: str, size: int) -> bool:
    """Wants no payload: only headers are read."""
    return False


def samples(
    file: IO[bytes], source: Input, *, wants: Wants, offset: int = 0, row: int = 0, tally: Tally | None = None
) -> Iterator[Sample]:
    """The samples from the header at `offset`, which begins sample number `row`.

    tally: counts the entries, when given. Raises InputError for a broken tar, a repeated member and a sample in two
    places.
    """
    tally = Tally() if tally is None else tally
    places: dict[str, int] = {}
    key: str | None = None
    at = 0
    found: dict[str, Member] = {}
    data: dict[str, bytes] = {}
    for member in members(file, source, offset=offset):
        split = split_name(member.name) if member.kind == FILE else None
        if split is None:
            tally.passed[_what(member)] += 1
            continue
        if split[0] != key:
            if key is not None:
                tally.count(found.keys())
                yield Sample(key, row, at, found, data)
                row += 1
            key, at, found, data = split[0], member.offset, {}, {}
            # webdataset starts another sample wherever the key changes, so members apart would be two half samples.
            if key in places:
                raise InputError(
                    f"The sample {key!r} of {source.uri} is in two places, at bytes {places[key]:,} and {at:,} "
                    f"(member {member.name!r}). Members of a sample must be adjacent, and a key may come once in a "
                    "tar; sort the tar by name, or rename one."
                )
            places[key] = at
        suffix = split[1]
        if suffix in found:
            raise InputError(
                f"The sample {key!r} of {source.uri} has its member {member.name!r} twice, at bytes "
                f"{found[suffix].offset:,} and {member.offset:,}. Which one is meant is not clear; "
                "remove or rename one."
            )
        found[suffix] = member
        if wants(split[0], suffix, member.size):
            data[suffix] = payload(file, source, member)
    if key is not None:
        tally.count(found.keys())
        yield Sample(key, row, at, found, data)


def _what(member: Member) -> str:
    if member.kind == FOLDER:
        return "folders"
    return "files whose name has no key and suffix" if member.kind == FILE else f"{member.kind}s"


HEADER_THREADS: Final = 4
"""Tars whose headers are read at once; more compete for the disk, and each tar in a bucket buffers 50 MB."""

PIECE_BYTES: Final = 256 << 20
"""Tar bytes of one piece, so that a tar of many GB is read by many tasks, each in bounded memory."""


def cuts(file: IO[bytes], source: Input, tally: Tally, limit: int | None = None) -> list[tuple[int, int]]:
    """(first sample, offset of its header) of each piece of about PIECE_BYTES, over the first `limit` samples."""
    found: list[tuple[int, int]] = []
    for sample in samples(file, source, wants=nothing, tally=tally):
        if not found or sample.offset - found[-1][1] >= PIECE_BYTES:
            found.append((sample.row, sample.offset))
        if sample.row + 1 == limit:
            break
    return found
