"""Clean texts: undo what pipelines did to them, and reject what is no caption.

Invariant: `clean_texts` equals `clean_text` row by row. It is fast because one pass over the bytes finds the rows that
need no change (most ASCII captions); only the others are cleaned one at a time in Python. `catalog.wording` has the
normal form by which repeats are found.
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from catalog.wording import normal_form
from infra.errors import ConfigError
from pipelines.arrays import offsets_of
from pipelines.records import Source

TRANSFORM_VERSION = "1"
"""Part of every dataset version: raise it whenever a rule of cleaning or grouping gives another result."""


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Options that decide what is kept; all are part of the dataset's version."""

    repair_byte_escapes: bool | None = None
    "Undo literal `\\xc2\\xae` in texts that a faulty `str(bytes)` produced; None: as the source declares."
    html_entities: bool = True
    "Replace `&amp;` and other entities that end in a semicolon, one level."
    repeats: bool = True
    "Reject a caption that stands earlier in the same scene, raw or normalised."
    max_group_records: int = 64
    "A scene with more records is quarantined whole: hosts serve one placeholder picture under thousands of URLs."
    placeholder_urls: int = 3
    "The alt texts of a scene with this many distinct pages (URL without query) or more must resemble one another."
    placeholder_similarity: float = 0.1
    "Smallest mean Jaccard similarity of the words of those alt texts, 0 to 1."

    def __post_init__(self) -> None:
        if self.max_group_records < 1:
            raise ConfigError(
                f"clean.max_group_records is {self.max_group_records}; a scene needs at least 1 record. Use 1 or more."
            )
        if self.placeholder_urls < 2:
            raise ConfigError(
                f"clean.placeholder_urls is {self.placeholder_urls}; one URL has nothing to resemble. Use 2 or more."
            )
        if not 0 <= self.placeholder_similarity <= 1:
            raise ConfigError(
                f"clean.placeholder_similarity is {self.placeholder_similarity}; Jaccard similarities lie in 0 to 1."
            )

    def repairs(self, source: Source) -> bool:
        """Whether literal byte escapes of this source are undone."""
        return source.repairs_byte_escapes if self.repair_byte_escapes is None else self.repair_byte_escapes


@dataclass(frozen=True)
class Cleaned:
    """Texts after cleaning, aligned with the input.

    text: large_string, null where rejected. reason: object array of str or None. detail: sparse, by row.
    repaired: bool (N,). sums: uint64 (N,), equal for texts of equal normal form; the converse must be checked.
    """

    text: pa.LargeStringArray
    reason: NDArray[np.object_]
    detail: dict[int, str]
    repaired: NDArray[np.bool_]
    sums: NDArray[np.uint64]


# --- one text -----------------------------------------------------------------------------------------------------

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BYTE_ESCAPE = re.compile(r"\\x[0-9a-fA-F]{2}")
_REPR_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[\\'\"nrt])")
_REPR_CHARACTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_MISSING = frozenset({"", "nan", "none", "null"})
_WHITE_CONTROLS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85"
_CONTROLS: dict[int, str | None] = {
    code: (" " if chr(code) in _WHITE_CONTROLS else None) for code in [*range(32), *range(127, 160)]
}
_CONTROLS[0xFEFF] = None  # byte order mark, left in the middle of texts by concatenated files


def clean_text(
    raw: bytes | None, *, repair: bool, entities: bool = True
) -> tuple[str | None, str | None, str | None, bool]:
    """One text cleaned: (text, None, None, repaired), or (None, reason, detail, False) when it is rejected.

    Steps in order: strict UTF-8; literal byte escapes (if `repair`); HTML entities; control characters (white ones
    become a space, others vanish); Unicode NFC; runs of white space to one space; nothing left, or nan/None/null.
    """
    if raw is None:
        return None, "missing_text", None, False
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return None, "invalid_utf8", f"byte 0x{raw[error.start]:02x} at offset {error.start}", False
    repaired = False
    if repair and _BYTE_ESCAPE.search(text):
        text, repaired = _undo_bytes_repr(text)
    if entities and "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match.group()), text)
    text = " ".join(unicodedata.normalize("NFC", text.translate(_CONTROLS)).split())
    if text.casefold() in _MISSING or not (text.isascii() or any(_is_visible(c) for c in text)):
        return None, "missing_text", None, False
    return text, None, None, repaired


def _is_visible(character: str) -> bool:
    """Neither a control, format, private or unassigned character nor a space (Unicode categories C and Z)."""
    return unicodedata.category(character)[0] not in "CZ"


def _undo_bytes_repr(text: str) -> tuple[str, bool]:
    """Invert `str(bytes)` without its quotes; the text stays as it is when the bytes are not UTF-8."""

    def byte(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes([int(code[1:], 16)]) if code[:1] == b"x" else _REPR_CHARACTERS.get(code, code)

    try:
        return _REPR_ESCAPE.sub(byte, text.encode()).decode(), True
    except UnicodeDecodeError:
        return text, False


BROKEN_PICTURES = frozenset(
    {
        "a small image used to signify a broken web image link",
        "broken image",
        "broken image link",
        "cannot see image",
        "cannot see picture",
        "cannot see picture to describe",
        "cannot see the image",
        "cannot see the picture",
        "i can not see an image here",
        "i can t see the image",
        "i can t see the picture",
        "i cannot see an image here",
        "i cannot see the image",
        "i cannot see the picture",
        "image does not load",
        "image not available",
        "image not found",
        "image unavailable",
        "no image",
        "no image available",
        "no picture",
        "picture not available",
        "the image did not load",
        "the image links are broken",
        "the image does not load",
        "the image is missing",
        "the picture did not load",
        "there is no image",
        "there is no image here",
        "there is no picture",
        "there is not an image here",
        "this image is not available",
        *(" ".join(["images are missing"] * times) for times in range(1, 41)),
    }
)
"""Normal forms of captions of images that did not load, as seen in Flickr30k and on the web. Only whole captions are
compared: "We cannot see the face of the girl" is a caption like any other."""


# --- many texts ---------------------------------------------------------------------------------------------------


@functools.cache
def _letter_weights() -> bytes:
    """Weight of each byte in `sums`: 0 for bytes that the normal form drops, equal for both cases of a letter."""
    weights = bytearray((code * 167 + 89) % 251 + 1 for code in range(256))
    for code in range(128):
        character = chr(code)
        weights[code] = weights[ord(character.lower())] if character.isalnum() else 0
    return bytes(weights)


# `bytes.translate` maps 1.4 GB/s, NumPy's table look-up 0.3. Weights of one byte collide now and then; every collision
# is checked, so they cost time and never a wrong answer.
_SPECIAL = bytes(code < 32 or code >= 127 or code in b"&\\" for code in range(256))


def _letter_sums(data: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sum of the weights of each row's bytes; 0 for an empty row, which `reduceat` alone would get wrong."""
    sums = np.zeros(len(lengths), np.uint64)
    filled = np.flatnonzero(lengths > 0)
    if len(filled):
        weights = np.frombuffer(data.translate(_letter_weights()), np.uint8)
        sums[filled] = np.add.reduceat(weights, starts[filled], dtype=np.uint32)
    return sums


def letter_sums(texts: list[str]) -> NDArray[np.uint64]:
    """Letter sums of cleaned texts (N,): equal for texts of equal normal form."""
    # An ASCII text and its normal form have equal sums. Folding may turn other letters into ASCII, so it comes first.
    encoded = [text.encode() if text.isascii() else normal_form(text).encode() for text in texts]
    lengths = np.array([len(e) for e in encoded], np.int64)
    return _letter_sums(b"".join(encoded), np.cumsum(lengths) - lengths, lengths)


@functools.cache
def _broken_sums() -> NDArray[np.uint64]:
    return letter_sums(sorted(BROKEN_PICTURES))


def clean_texts(raw: pa.LargeBinaryArray, *, repair: bool, entities: bool = True) -> Cleaned:
    """`clean_text` for a whole array, and the rejection of captions of broken pictures."""
    n = len(raw)
    reason = np.full(n, None, np.object_)
    repaired = np.zeros(n, np.bool_)
    detail: dict[int, str] = {}
    if n == 0:
        return Cleaned(pa.array([], pa.large_string()), reason, detail, repaired, np.zeros(0, np.uint64))
    slow, sums = _scan(raw)
    rows = np.flatnonzero(slow)
    texts: list[str | None] = []
    for row, value in zip(rows.tolist(), raw.take(pa.array(rows)).to_pylist(), strict=True):
        text, why, what, was_repaired = clean_text(value, repair=repair, entities=entities)
        texts.append(text)
        reason[row], repaired[row] = why, was_repaired
        if what is not None:
            detail[row] = what
    sums[rows] = letter_sums([text or "" for text in texts])
    cleaned = _replace(raw, slow, texts)
    for row in np.flatnonzero(np.isin(sums, _broken_sums())).tolist():
        if reason[row] is None and normal_form(cleaned[row].as_py()) in BROKEN_PICTURES:
            reason[row] = "broken_picture"
    return Cleaned(cleaned, reason, detail, repaired, sums)


def _scan(raw: pa.LargeBinaryArray) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """One pass over the bytes: which rows may need cleaning, and the letter sums of all of them."""
    n = len(raw)
    offsets = offsets_of(raw)
    lengths = np.diff(offsets)
    slow = lengths <= 4  # empty, or one of nan, None, null
    if raw.null_count:
        slow |= np.asarray(raw.is_null())
    if offsets[-1] == offsets[0]:
        return slow, np.zeros(n, np.uint64)
    data = raw.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0])).to_pybytes()
    starts = offsets[:-1] - offsets[0]
    special = np.frombuffer(data.translate(_SPECIAL), np.uint8).copy()
    blank = np.frombuffer(data, np.uint8) == 32
    special[1:] |= blank[1:] & blank[:-1]  # a pair across two rows only costs a slow path
    filled = np.flatnonzero(lengths > 0)
    slow[filled] |= np.maximum.reduceat(special, starts[filled]) > 0
    slow[filled] |= blank[starts[filled]] | blank[starts[filled] + lengths[filled] - 1]
    return slow, _letter_sums(data, starts, lengths)


def _replace(raw: pa.LargeBinaryArray, slow: NDArray[np.bool_], texts: list[str | None]) -> pa.LargeStringArray:
    if not texts:
        return raw.cast(pa.large_string())
    encoded = pa.array([None if t is None else t.encode() for t in texts], pa.large_binary())
    # Rows outside the slow path are ASCII, so the UTF-8 check of the cast fails only if the scan is wrong.
    return pc.replace_with_mask(raw, pa.array(slow), encoded).cast(pa.large_string())
