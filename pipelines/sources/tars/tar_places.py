"""Split and label of a tar by its path; the label names the samples that have no id of their own.

Invariant: both depend on the name of the tar and of its folder, never on which folder above was named as input. A
folder name that decides is part of the uri, and so of the version.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from infra import storage
from infra.errors import InputError
from infra.storage import archives
from pipelines.records import Input
from pipelines.sources.formats.names import listed
from pipelines.sources.options import FALLBACK_SPLIT

_SPLITS: Final = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
_WORD: Final = re.compile(rf"({'|'.join(_SPLITS)})\d*")
"""`val`, `train2017`; no part of another word (`latest`, `trainset`)."""


@dataclass(frozen=True, kw_only=True)
class Tar(Input):
    """A tar with its split. label: `NAME.tar`, or `val/NAME.tar` in a folder of a split; None: two inputs have it."""

    split: str
    label: str | None

    def fallback(self, key: str) -> str:
        """Id of a sample that names no picture. Raises InputError when it would name a sample of another tar too."""
        if self.label is None:
            raise InputError(
                f"The sample {key!r} of {self.uri} names no picture (sha256, uid), and another input is named like "
                "this tar, so its name and the key would be one id for two scenes. "
                "Rename the tars, ingest them apart, or name the field of the id with `--set source.id=<field>`."
            )
        return f"{self.label}#{key}"


def placed(inputs: Sequence[Input], option: str) -> list[Tar]:
    """The inputs by uri, with split (`option` if given) and label. Raises InputError for a name of two splits."""
    places = [_Place.of(source) for source in inputs]
    # Two tars with one label would give two scenes one id, so neither of them has a label.
    times = Counter(place.label for place in places)
    # A tar directly in the input folder has a uri without that folder, although the folder may decide its split.
    deciding = (p.folder for p, source in zip(places, inputs, strict=True) if p.by_folder and "/" not in source.uri)
    root = next((f"{folder}/" for folder in deciding), "")
    found = [
        Tar(
            uri=root + source.uri,
            url=source.url,
            split=option or place.split(source),
            label=place.label if times[place.label] == 1 else None,
        )
        for source, place in zip(inputs, places, strict=True)
    ]
    return sorted(found, key=lambda tar: tar.uri)


def split_notes(tars: Sequence[Tar], option: str) -> Iterator[str]:
    """Which splits were taken from names; also when all samples are of one."""
    if option:
        return
    counts = Counter(tar.split for tar in tars)
    words = listed(
        [f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    )
    yield (
        f"splits are taken from the name of each tar, else of its folder, else train: {words}; "
        "`--set source.split=<name>` gives all one"
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Names of a file and its folder. by_name: splits in the file's name; by_folder: the folder's, if that is none."""

    folder: str
    name: str
    by_name: frozenset[str]
    by_folder: str | None

    @classmethod
    def of(cls, source: Input) -> _Place:
        """A zip archive is the folder of the members at its top level."""
        path = storage.absolute(source.url)
        if archives.is_member(source.url):
            member = source.url.removeprefix(archives.PREFIX).rpartition("::")[0]
            path = f"{archives.archive_of(source.url).removesuffix(archives.ENDING)}/{member}"
        above, _, name = path.rpartition("/")
        folder = above.rpartition("/")[2]
        words = (_WORD.fullmatch(token) for token in re.split(r"[^a-z0-9]+", name.lower()))
        by_name = frozenset(_SPLITS[word[1]] for word in words if word)
        word = None if by_name else _WORD.fullmatch(folder.lower())
        return cls(folder=folder, name=name, by_name=by_name, by_folder=_SPLITS[word[1]] if word else None)

    @property
    def label(self) -> str:
        """The name that distinguishes its samples from those of other tars."""
        return f"{self.folder}/{self.name}" if self.by_folder else self.name

    def split(self, source: Input) -> str:
        """Raises InputError for a name that holds several splits."""
        if len(self.by_name) > 1:
            raise InputError(
                f"The name of {source.uri} says {' and '.join(sorted(self.by_name))}, so the split of its samples is "
                "not clear. Give all samples one with `--set source.split=<name>`, or rename the tar."
            )
        return next(iter(self.by_name), None) or self.by_folder or FALLBACK_SPLIT
