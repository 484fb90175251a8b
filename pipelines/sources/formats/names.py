"""Names of files and columns: lists and hints for messages, and the scene id in a picture's file name.

Invariant: a list in a message never has more than `MOST_NAMED` names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final

from infra.errors import InputError
from pipelines.records import Input

MOST_NAMED: Final = 12

DEFAULT_PORTS: Final = {"http": "80", "https": "443"}

_COCO_STEM = re.compile(r"(?:COCO_[a-z]+\d{4}_)?(\d{12})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)")


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


def none_read(inputs: Sequence[Input], wanted: str, hint: str) -> InputError:
    """The error for inputs of which none is what a source reads."""
    return InputError(f"None of the inputs is {wanted} by its name: {listed([i.uri for i in inputs])}. {hint}")


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


def as_sha256(text: str) -> str | None:
    """A sha256 in lower-case hex; None for any other text."""
    lower = text.lower()
    return lower if _SHA256.fullmatch(lower) else None


def normalise_url(url: str) -> str:
    """The URL with lower-case scheme and host, and without default port and fragment.

    The query is kept, because many hosts name the picture in it. Percent-encoding is kept, because servers may treat
    `%7E` and `~` as two addresses. A text that does not look like a URL is returned without white space at its ends.
    """
    match = _URL.match(url.strip())
    if not match:
        return url.strip()
    scheme, authority, rest = match[1].lower(), match[2], match[3]
    user, at, host = authority.rpartition("@")
    name, colon, port = host.rpartition(":")
    # `name` ends in a colon for an IPv6 address without brackets, whose last part is no port.
    if colon and port in ("", DEFAULT_PORTS.get(scheme)) and not name.endswith(":"):
        host = name
    return f"{scheme}://{user}{at}{host.lower()}{rest}".rstrip()
