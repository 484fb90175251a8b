"""What each column of a table becomes: the options of `table` resolved against the columns that the files have.

Owns: the grammar of the column options, the guess of the caption column, the sentence for a column that is not there.
Invariant: a resolved layout names only columns of the file it was resolved against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from catalog.schema import ROLES, SPLIT_PATTERN
from infra.errors import ConfigError, InputError
from pipelines.sources.formats.names import listed, nearest

KNOWN_TEXTS: Final = ("caption", "captions", "text", "texts", "alt_text", "sentence", "sentences", "raw", "alt")
"""Names, upper case aside, under which public caption sets keep their captions; the first that a table has is the guess."""

DEFAULT_ROLE: Final = "human"
COLUMN_PREFIX: Final = "column:"
FALLBACK_SPLIT: Final = "train"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Column names by what they become; None: the table has no such column."""

    texts: tuple[tuple[str, str], ...]
    "(column, role), in the order of the fields."
    id: str | None = None
    image: str | None = None
    image_sha256: str | None = None
    width: str | None = None
    height: str | None = None
    split: str | None = None
    "Column of the split; else all rows are of `split_name`, as are those that do not say theirs."
    split_name: str = FALLBACK_SPLIT

    @property
    def names(self) -> list[str]:
        """All columns to read, each once."""
        others = (self.id, self.image, self.image_sha256, self.width, self.height, self.split)
        return list(dict.fromkeys([name for name, _ in self.texts] + [name for name in others if name is not None]))

    @property
    def meanings(self) -> Mapping[str, str]:
        """Column -> what it becomes, in words."""
        words = {
            self.id: "scene id",
            self.image: "image uri",
            self.image_sha256: "image sha256",
            self.width: "image width",
            self.height: "image height",
            self.split: "split",
        }
        found: dict[str, str] = {}
        for name, meaning in (*((n, f"text:{role}") for n, role in self.texts), *words.items()):
            if name is not None:
                found[name] = f"{found[name]}, {meaning}" if name in found else meaning
        return found


def parse_texts(option: str) -> tuple[tuple[str, str], ...]:
    """`a,b:alt` as ((a, human), (b, alt)); a suffix that is no role belongs to the name.

    Raises ConfigError for an empty name and for a column that is named twice.
    """
    if not option.strip():
        return ()
    texts = []
    for part in option.split(","):
        name, colon, role = part.strip().rpartition(":")
        texts.append((name, role) if colon and role in ROLES else (part.strip(), DEFAULT_ROLE))
    names = [name for name, _ in texts]
    if "" in names or len(set(names)) < len(names):
        message = f"The option source.text={option!r} names an empty column, or one column twice. Write `column` or `column:role` with commas between; roles: {', '.join(ROLES)}."
        raise ConfigError(message)
    return tuple(texts)


def parse_split(option: str) -> tuple[str | None, str]:
    """`(column, fallback name)` of `column:<name>`, or `(None, name)` of a split name. Raises ConfigError."""
    if option.startswith(COLUMN_PREFIX) and len(option) > len(COLUMN_PREFIX):
        return option.removeprefix(COLUMN_PREFIX), FALLBACK_SPLIT
    if not SPLIT_PATTERN.fullmatch(option):
        message = f"The option source.split={option!r} is neither a split name (lower-case letters, digits, `_`) nor `column:<name>`."
        raise ConfigError(message)
    return None, option


def guess_texts(columns: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The first of KNOWN_TEXTS that is among the columns, upper case aside; () when none is."""
    folded = {name.lower(): name for name in reversed(columns)}
    return next((((folded[known], DEFAULT_ROLE),) for known in KNOWN_TEXTS if known in folded), ())


def check_columns(layout: Layout, columns: Sequence[str], *, uri: str) -> None:
    """Raises InputError when the layout names no text, or a column that the file does not have."""
    if not layout.texts:
        message = f"No column of {uri} has a known caption name ({', '.join(KNOWN_TEXTS)}). Name one with `--set source.text=<column>`; its columns: {listed(columns)}."
        raise InputError(message)
    for name in layout.names:
        if name not in columns:
            message = f"{uri} has no column {name!r}.{nearest(name, columns)} Its columns: {listed(columns)}."
            raise InputError(message)


def splits_found(counts: Mapping[str, int], layout: Layout, *, uri: str) -> dict[str, int]:
    """Rows by split name, blank names (whose rows become rejects) under the fallback.

    Raises InputError when the split column holds a name that cannot be a split.
    """
    wrong = sorted(name for name in counts if name.strip() and not SPLIT_PATTERN.fullmatch(name))
    if wrong:
        message = f"Column {layout.split!r} of {uri} holds {listed([repr(name) for name in wrong])}, which cannot name a split (lower-case letters, digits, `_`). Rename them, or choose another column."
        raise InputError(message)
    found: dict[str, int] = {}
    for name, rows in sorted(counts.items()):
        split = name if name.strip() else layout.split_name
        found[split] = found.get(split, 0) + rows
    return found
