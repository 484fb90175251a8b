"""Texts and the scene id of one sample of a tar, from its text members and its json.

Owns: which members and json fields are texts, the id of a scene, the reject of what cannot be read. Does not own: cleaning.
A sample is named by what its json says of its picture: `sha256`, else `url` where img2dataset wrote it (elsewhere it may be of a page with
many pictures), else `uid`; and a sample of ours by its `scene_key`. Its key in the tar is the number of a row in one download
(UCSC-VLAA/Recap-DataComp-1B#11), so it counts only together with the tar, and only where the json holds nothing better.
Invariant: a sample gives at least one text; where it has none, that is one absent text, which becomes a reject (A12).
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from catalog.schema import ROLES
from pipelines.sources import layout as lay
from pipelines.sources.documents import NotJson, encode, name_of, parse, show
from pipelines.sources.lines import MAX_LINE_BYTES
from pipelines.sources.recap import normalise_url
from pipelines.sources.tar_samples import Sample

TEXT_BYTES_MAX: Final = MAX_LINE_BYTES
"""Largest text or json that is read, before and after gzip; more is no text for people."""

TEXT_ENDS: Final = ("txt", "text")
"""Last parts of suffixes that are texts: `txt`, `0.txt`, `en.text`."""

ELEMENT_TEXTS: Final = ("text", "caption", "raw")
"""Members under which an object in a list of captions holds its text."""

ID_FIELDS: Final = ("sha256", "url", "uid")
STATE_FIELDS: Final = ("key", "status", "error_message")
"""What img2dataset adds to the json of a sample and to each row of its metadata."""

KEY: Final = "__key__"
"""webdataset's name of a sample's key, for `source.id`."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

Text: TypeAlias = tuple[str, str, bytes | None, str | None]
"""(field, role, text as read, None or what is wrong), the arguments of `rows.Builder.text`."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How texts and ids are found. texts: (member suffix or json field, role); none: by the known names.

    role: of texts that do not say theirs. id: json field, KEY, or empty for ID_FIELDS.
    """

    texts: tuple[tuple[str, str], ...] = ()
    role: str = lay.DEFAULT_ROLE
    id: str = ""

    def is_text(self, suffix: str) -> bool:
        """Whether a member of this suffix is one of the texts."""
        plain = suffix.removesuffix(".gz")
        if self.texts:
            return any(name in (suffix, plain) for name, _ in self.texts)
        return plain.rpartition(".")[2] in TEXT_ENDS

    def wants(self, suffix: str, size: int) -> bool:
        """Whether the payload must be read to know texts and id."""
        return size <= TEXT_BYTES_MAX and (self.is_text(suffix) or suffix in ("json", "json.gz"))


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a sample says of its scene. id: None when it cannot be told, which rejects its texts.

    sha256, url: of its json. fields: names in the json.
    """

    id: str | None
    texts: list[Text]
    sha256: str | None = None
    url: str | None = None
    fields: tuple[str, ...] = ()


def told(sample: Sample, reading: Reading, *, uri: str) -> Told:
    """Texts and id of the sample; uri: of its tar."""
    document, raw, wrong = _json(sample)
    if wrong is None and isinstance(document, dict):
        id_, broken = scene_id(document, reading, fallback=f"{uri}#{sample.key}", key=sample.key)
        texts = list(_texts(sample, document, reading))
    else:
        id_, broken = None, f"malformed_record: {wrong or f'its json is {name_of(document)}, not an object'}"
        texts = list(_texts(sample, {}, reading))
        if all(text is None for _, _, text, _ in texts):
            texts = [("json", reading.role, raw, None)]
        document = {}
    texts = texts or [(TEXT_ENDS[0], reading.role, None, None)]
    if broken is not None:
        texts = [(field, role, text, broken) for field, role, text, _ in texts]
    return Told(
        id=None if broken else id_,
        texts=texts,
        sha256=sha256_of(document),
        url=url_of(document),
        fields=tuple(filter(_is_unicode, document)),
    )


def row_told(row: Mapping[str, Any], reading: Reading, *, key: str, fallback: str | None) -> Told:
    """Texts and id of a row of img2dataset's metadata; its columns are what the json of a sample holds."""
    id_, broken = scene_id(row, reading, fallback=fallback, key=key)
    named = reading.texts or [(name, reading.role) for name in row_texts(list(row), reading)]
    texts = [text for name, role in named for text in _field(row.get(name), name, role)]
    texts = texts or [(TEXT_ENDS[0], reading.role, None, None)]
    if broken is not None:
        texts = [(field, role, text, broken) for field, role, text, _ in texts]
    return Told(id=None if broken else id_, texts=texts, sha256=sha256_of(row), url=url_of(row))


def row_texts(columns: Sequence[str], reading: Reading) -> list[str]:
    """The columns of metadata that hold texts: those named, else `txt`, else the first of a known name."""
    if reading.texts:
        return [name for name, _ in reading.texts]
    return [TEXT_ENDS[0]] if TEXT_ENDS[0] in columns else [name for name, _ in lay.guess_texts(columns)]


# --- ids ----------------------------------------------------------------------------------------------------------


def scene_id(
    document: Mapping[str, Any], reading: Reading, *, fallback: str | None, key: str
) -> tuple[str | None, str | None]:
    """(scene id, what is wrong) by the json of a sample, or by a row of img2dataset's metadata."""
    if reading.id == KEY:
        return key, None
    if reading.id:
        return _named(document.get(reading.id), reading.id)
    if "dataset" in document and isinstance(document.get("scene_key"), str):
        return _named(document["scene_key"], "scene_key")
    if sha256 := sha256_of(document):
        return sha256, None
    if is_fetched(document) and (url := url_of(document)):
        return url, None
    if document.get("uid") not in (None, ""):
        return _named(document["uid"], "uid")
    return fallback, None


def is_fetched(fields: Container[str]) -> bool:
    """Whether these are the fields of img2dataset, whose `url` is the picture's."""
    return all(name in fields for name in ("url", "key", "status"))


def _named(value: Any, field: str) -> tuple[str | None, str | None]:
    if value is None or value == "":
        return None, None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value), None
    if not isinstance(value, str):
        return None, f"malformed_record: the scene id in `{field}` is {name_of(value)}; write it as text"
    if _is_unicode(value):
        return value, None
    return None, f"malformed_record: the scene id in `{field}` is not Unicode"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def sha256_of(document: Mapping[str, Any]) -> str | None:
    """`sha256` in lower case; None where it is not 64 hex digits."""
    value = document.get("sha256")
    lower = value.lower() if isinstance(value, str) else ""
    return lower if _SHA256.fullmatch(lower) else None


def url_of(document: Mapping[str, Any]) -> str | None:
    """`url`, normalised; None where there is none."""
    value = document.get("url")
    if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
        return None
    return normalise_url(value)


# --- texts --------------------------------------------------------------------------------------------------------


def _texts(sample: Sample, document: Mapping[str, Any], reading: Reading) -> Iterator[Text]:
    for name, role in reading.texts:
        suffix = next((s for s in (name, f"{name}.gz") if s in sample), None)
        if suffix is not None:
            yield _member(sample, suffix, role)
        else:
            yield from _field(document.get(name), name, role)
    if reading.texts:
        return
    found = sorted((s for s in sample.members if reading.is_text(s)), key=_natural)
    for suffix in found:
        yield _member(sample, suffix, reading.role)
    if not found:
        for name, _ in lay.guess_texts(list(document)):
            yield from _field(document[name], name, reading.role)


def _natural(suffix: str) -> list[tuple[int, int, str]]:
    """`txt`, `0.txt`, `2.txt`, `10.txt`: by the parts before the last, numbers as numbers."""
    parts = suffix.removesuffix(".gz").split(".")[:-1]
    return [(0, int(p), p) if p.isascii() and p.isdigit() and len(p) < 19 else (1, 0, p) for p in parts]


def _member(sample: Sample, suffix: str, role: str) -> Text:
    data, wrong = _payload(sample, suffix)
    return suffix, role, data, None if wrong is None else f"malformed_record: {wrong}"


def _field(value: Any, name: str, role: str) -> Iterator[Text]:
    if not isinstance(value, list):
        yield _element(value, name, role)
        return
    for place, element in enumerate(value):
        yield _element(element, f"{name}[{place}]", role)


def _element(value: Any, field: str, role: str) -> Text:
    """A text, or an object that holds one and may say its role."""
    if isinstance(value, dict):
        said = value.get("role")
        role = said if said in ROLES else role
        value = next((value[name] for name in ELEMENT_TEXTS if name in value), value)
    if value is None or isinstance(value, bytes):
        return field, role, value, None
    if isinstance(value, str):
        return field, role, encode(value), None
    return field, role, _shown(value), f"malformed_record: `{field}` is {name_of(value)}, not a text"


def _shown(value: Any) -> bytes | None:
    try:
        return show(value)
    except RecursionError:
        return None  # a thousand lists inside one another


# --- payloads -----------------------------------------------------------------------------------------------------


def _json(sample: Sample) -> tuple[Any, bytes | None, str | None]:
    """(the document, its raw bytes, what is wrong); an empty object where the sample has no json."""
    suffix = next((s for s in ("json", "json.gz") if s in sample), None)
    if suffix is None:
        return {}, None, None
    raw, wrong = _payload(sample, suffix)
    if raw is None or wrong is not None:
        return None, raw, wrong
    try:
        return parse(raw), raw, None
    except NotJson as error:
        return None, raw, f"its json does not parse: {error}"


def _payload(sample: Sample, suffix: str) -> tuple[bytes | None, str | None]:
    data = sample.data.get(suffix)
    if data is None:
        return None, f"`{suffix}` has {sample.members[suffix].size:,} bytes, more than {TEXT_BYTES_MAX >> 20} MiB"
    if not suffix.endswith(".gz"):
        return data, None
    try:
        plain = gzip.GzipFile(fileobj=io.BytesIO(data)).read(TEXT_BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        return data, f"`{suffix}` is not whole gzip ({error})"
    if len(plain) > TEXT_BYTES_MAX:
        return None, f"`{suffix}` unpacks to more than {TEXT_BYTES_MAX >> 20} MiB"
    return plain, None
