"""Options that several sources share: captions with their roles, splits, and one of several words.

Invariant: an option that does not parse is a ConfigError when the source is built, before any file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from catalog.schema import ROLES, SPLIT_PATTERN
from infra.errors import ConfigError

KNOWN_TEXTS: Final = ("caption", "captions", "text", "texts", "alt_text", "sentence", "sentences", "raw", "alt")
"""Column names, upper case aside, under which public caption sets keep their captions, in the order of the guess."""

DEFAULT_ROLE: Final = "human"
FALLBACK_SPLIT: Final = "train"
COLUMN_PREFIX: Final = "column:"

Roles = tuple[tuple[str, str], ...]
"""(column, role) of each text, in the order of the fields."""


def parse_texts(option: str) -> Roles:
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
        raise ConfigError(
            f"The option source.text={option!r} names an empty column, or one column twice. "
            f"Write `column` or `column:role` with commas between; roles: {', '.join(ROLES)}."
        )
    return tuple(texts)


def guess_texts(columns: Sequence[str]) -> Roles:
    """The first of KNOWN_TEXTS that is among the columns, upper case aside; () when none is."""
    folded = {name.lower(): name for name in reversed(columns)}
    return next((((folded[known], DEFAULT_ROLE),) for known in KNOWN_TEXTS if known in folded), ())


def parse_split(option: str) -> tuple[str | None, str]:
    """`(column, fallback name)` of `column:<name>`, or `(None, name)` of a split name. Raises ConfigError."""
    if option.startswith(COLUMN_PREFIX) and len(option) > len(COLUMN_PREFIX):
        return option.removeprefix(COLUMN_PREFIX), FALLBACK_SPLIT
    if not SPLIT_PATTERN.fullmatch(option):
        raise ConfigError(
            f"The option source.split={option!r} is neither a split name (lower-case letters, digits, `_`) "
            "nor `column:<name>`."
        )
    return None, option


def check_split(option: str) -> None:
    """Raises ConfigError for a text that is no split name; empty is legal."""
    if option and not SPLIT_PATTERN.fullmatch(option):
        raise ConfigError(f"The option source.split={option!r} is no split name (lower-case letters, digits, `_`).")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError when the value of the option is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"The option source.{name}={value!r} is not one of {', '.join(choices)}.")
