"""How a name that does not fit is reported: what was found, and the nearest of what was meant.

Owns: the wording of lists and hints in error sentences, and the scene id that a picture's file name holds.
Does not own: any error. Invariant: a list in a sentence is never longer than `MOST_NAMED` names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

MOST_NAMED: Final = 12

NO_WRITERS: Final[Mapping[str, str]] = {}
"""For sources whose bytes no library but pyarrow decides."""

_COCO_STEM = re.compile(r"(?:COCO_[a-z]+\d{4}_)?(\d{12})")


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` (with the leading space), or nothing when no known name is near, upper case aside."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.lower().strip(), candidate)
    near = difflib.get_close_matches(name.lower().strip(), folded, n=1)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""


def listed(names: Sequence[str]) -> str:
    """The names with commas; the rest of a long list as a count; `none` for an empty one."""
    if not names:
        return "none"
    shown = ", ".join(names[:MOST_NAMED])
    rest = len(names) - MOST_NAMED
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def base(uri: str) -> str:
    """The last component of a path, without `.gz`."""
    return uri.rsplit("/", 1)[-1].removesuffix(".gz")


def picture_id(path: str) -> str:
    """Scene id of a picture by its file name: the number in a COCO name, else the name without `.jpg`.

    COCO names one picture `COCO_val2014_000000000042.jpg` in 2014 and `000000000042.jpg` in 2017; both give `42`.
    """
    stem = path.rsplit("/", 1)[-1].removesuffix(".jpg")
    coco = _COCO_STEM.fullmatch(stem)
    return str(int(coco[1])) if coco else stem
