"""What each column of a table becomes: the options of `table` resolved against the columns of a file.

Invariant: a layout that passed `check_columns` names only columns of that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from catalog.schema import SPLIT_PATTERN
from infra.errors import InputError
from pipelines.sources.formats.names import listed, nearest
from pipelines.sources.options import FALLBACK_SPLIT, KNOWN_TEXTS

MEANINGS: Final = {
    "id": "scene id",
    "image": "image uri",
    "image_sha256": "image sha256",
    "width": "image width",
    "height": "image height",
    "split": "split",
}
"""Field of a layout -> what its column becomes, in words."""


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
    "Column of the split. Rows that name none, or all rows without the column, are of `split_name`."
    split_name: str = FALLBACK_SPLIT

    @property
    def names(self) -> list[str]:
        """All columns to read, each once."""
        return list(self.meanings)

    @property
    def meanings(self) -> Mapping[str, str]:
        """Column -> what it becomes, in words."""
        found: dict[str, str] = {}
        others = ((getattr(self, field), meaning) for field, meaning in MEANINGS.items())
        for name, meaning in (*((n, f"text:{role}") for n, role in self.texts), *others):
            if name is not None:
                found[name] = f"{found[name]}, {meaning}" if name in found else meaning
        return found


def check_columns(layout: Layout, columns: Sequence[str], *, uri: str) -> None:
    """Raises InputError when the layout names no text, or a column that the file does not have."""
    if not layout.texts:
        raise InputError(
            f"No column of {uri} has a known caption name ({', '.join(KNOWN_TEXTS)}). "
            f"Name one with `--set source.text=<column>`; its columns: {listed(columns)}."
        )
    for name in layout.names:
        if name not in columns:
            raise InputError(f"{uri} has no column {name!r}.{nearest(name, columns)} Its columns: {listed(columns)}.")


def splits_found(counts: Mapping[str, int], layout: Layout, *, uri: str) -> dict[str, int]:
    """Rows by split name, blank names (whose rows become rejects) under the fallback.

    Raises InputError when the split column holds a name that cannot be a split.
    """
    wrong = sorted(name for name in counts if name.strip() and not SPLIT_PATTERN.fullmatch(name))
    if wrong:
        raise InputError(
            f"Column {layout.split!r} of {uri} holds {listed([repr(name) for name in wrong])}, which cannot name a "
            "split (lower-case letters, digits, `_`). Rename them, or choose another column."
        )
    found: dict[str, int] = {}
    for name, rows in sorted(counts.items()):
        split = name if name.strip() else layout.split_name
        found[split] = found.get(split, 0) + rows
    return found
