"""Texts and the scene id of one sample of a tar, from its text members and its json.

The json names the scene: by `sha256`, else by `url` where img2dataset wrote it (elsewhere it may be the address of a
page with many pictures), else by `uid` in the form of DataComp (elsewhere it may be a user); in view tars of this
project by `scene_key`. The key of a sample is the number of a row in one download (UCSC-VLAA/Recap-DataComp-1B#11), so
it is used only together with the name of the tar, and only where the json names nothing.
Invariant: a sample gives at least one text; without any, that is one absent text, which becomes a reject (A12).
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.schema import DATASET_PATTERN, KEY_PATTERN, ROLES, read_back
from pipelines.sources.formats.documents import NotJson, is_unicode, name_of, parse, text_of
from pipelines.sources.formats.lines import MAX_LINE_BYTES
from pipelines.sources.formats.names import as_sha256, normalise_url
from pipelines.sources.formats.rows import Text
from pipelines.sources.formats.tar_samples import Sample
from pipelines.sources.options import DEFAULT_ROLE, guess_texts

TEXT_BYTES_MAX: Final = MAX_LINE_BYTES
"""Largest text or json that is read, before and after gzip; a larger one is no caption."""

TEXT_ENDS: Final = ("txt", "text")
"""Last parts of suffixes that are texts: `txt`, `0.txt`, `en.text`."""

ELEMENT_TEXTS: Final = ("text", "caption", "raw")
"""Members under which an object in a list of captions holds its text."""

ID_FIELDS: Final = ("sha256", "url", "uid")
STATE_FIELDS: Final = ("key", "status", "error_message")
"""Fields that img2dataset adds to the json of a sample and to each row of its metadata."""

SCENE_KEY: Final = "scene_key"
"""Json field of the samples in view tars of this project."""

KEY: Final = "__key__"
"""webdataset's name of a sample's key, for `source.id`."""

JSON_ENDS: Final = ("json", "json.gz")

_UID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How texts and ids are found. texts: (member suffix or json field, role); empty: by the known names.

    role: of texts that name none. id: json field, KEY, or empty for ID_FIELDS.
    """

    texts: tuple[tuple[str, str], ...] = ()
    role: str = DEFAULT_ROLE
    id: str = ""

    def is_text(self, suffix: str) -> bool:
        """Whether a member of this suffix is one of the texts."""
        plain = suffix.removesuffix(".gz")
        if self.texts:
            return any(name in (suffix, plain) for name, _ in self.texts)
        return plain.rpartition(".")[2] in TEXT_ENDS

    def wants(self, suffix: str, size: int) -> bool:
        """Whether the payload must be read to know texts and id."""
        return size <= TEXT_BYTES_MAX and (self.is_text(suffix) or suffix in JSON_ENDS)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a scene. id: None when unknown. field: that holds it, or None. wrong: why its texts are rejects."""

    id: str | None
    field: str | None
    wrong: str | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a sample says of its scene. id: None when it is unknown, which rejects its texts.

    named_by: the field that holds the id, None when the id is the name of the tar and the key. sha256, url: of its
    json. dataset: the goodviews dataset that its json names. fields: names in the json.
    """

    id: str | None
    texts: list[Text]
    named_by: str | None = None
    sha256: str | None = None
    url: str | None = None
    dataset: str | None = None
    fields: tuple[str, ...] = ()


def describe(
    sample: Sample, reading: Reading, fallback: Callable[[str], str], *, row: Mapping[str, Any] | None = None
) -> Description:
    """Texts and id of the sample.

    fallback: key -> id of a sample that nothing else names. row: of img2dataset's metadata, used when there is no json.
    """
    document, raw, wrong = _json(sample)
    has_row = row is not None and not any(suffix in sample for suffix in JSON_ENDS)
    if has_row:
        document = row
    if wrong is None and isinstance(document, Mapping):
        name = scene_name(document, reading, fallback, key=sample.key)
        texts = list(_texts(sample, document, reading))
        if has_row and not any(text and text.strip() for _, _, text, _ in texts):
            texts = list(_row_texts(document, reading))
    else:
        name = Name(None, None, f"malformed_record: {wrong or f'its json is {name_of(document)}, not an object'}")
        texts = list(_texts(sample, {}, reading))
        if all(text is None for _, _, text, _ in texts):
            texts = [("json", reading.role, raw, None)]
        document = {}
    return _description(document, name, texts, reading)


def describe_row(row: Mapping[str, Any], reading: Reading, fallback: Callable[[str], str], *, key: str) -> Description:
    """Texts and id of a row of img2dataset's metadata; its columns are the fields of the json of a sample."""
    name = scene_name(row, reading, fallback, key=key)
    return _description(row, name, list(_row_texts(row, reading)), reading)


def _description(document: Mapping[str, Any], name: Name, texts: list[Text], reading: Reading) -> Description:
    texts = texts or [(TEXT_ENDS[0], reading.role, None, None)]
    if name.wrong is not None:
        texts = [(field, role, text, name.wrong) for field, role, text, _ in texts]
    return Description(
        id=None if name.wrong else name.id,
        texts=texts,
        named_by=name.field,
        sha256=sha256_of(document),
        url=url_of(document),
        dataset=dataset_of(document),
        fields=tuple(filter(is_unicode, document)),
    )


def _row_texts(row: Mapping[str, Any], reading: Reading) -> Iterator[Text]:
    for name, role in reading.texts or [(name, reading.role) for name in row_texts(list(row), reading)]:
        yield from _field(row.get(name), name, role)


def unread_field(sample: Sample, reading: Reading, described: Description) -> str | None:
    """The json field whose texts are not read because the sample has text members, and these are other texts."""
    if reading.texts or not any(map(reading.is_text, sample.members)):
        return None
    document, _, wrong = _json(sample)
    if wrong is not None or not isinstance(document, dict):
        return None
    read = {text.strip() for _, _, text, _ in described.texts if text is not None}
    for name, role in guess_texts(list(document)):
        found = {text.strip() for _, _, text, _ in _field(document[name], name, role) if text is not None}
        if found - read - {b""}:
            return name
    return None


def row_texts(columns: Sequence[str], reading: Reading) -> list[str]:
    """The columns of metadata that hold texts: those named, else `txt`, else the first of a known name."""
    if reading.texts:
        return [name for name, _ in reading.texts]
    return [TEXT_ENDS[0]] if TEXT_ENDS[0] in columns else [name for name, _ in guess_texts(columns)]


# --- ids ----------------------------------------------------------------------------------------------------------


def scene_name(document: Mapping[str, Any], reading: Reading, fallback: Callable[[str], str], *, key: str) -> Name:
    """The name of the scene by the json of a sample, or by a row of img2dataset's metadata."""
    if reading.id == KEY:
        return Name(key, KEY)
    # View tars of goodviews come first: their key is the id that the scene had before, and joins other copies of it.
    if dataset_of(document) is not None and reading.id in ("", SCENE_KEY):
        return Name(read_back(document[SCENE_KEY]), SCENE_KEY)
    if reading.id:
        return _named(document.get(reading.id), reading.id)
    if sha256 := sha256_of(document):
        return Name(sha256, "sha256")
    if is_fetched(document) and (url := url_of(document)):
        return Name(url, "url")
    uid = document.get("uid")
    if isinstance(uid, str) and _UID.fullmatch(uid):
        return Name(uid, "uid")
    return Name(fallback(key), None)


def dataset_of(document: Mapping[str, Any]) -> str | None:
    """The goodviews dataset that the json of a sample in its view tars names; None for any other json."""
    dataset, scene_key = document.get("dataset"), document.get(SCENE_KEY)
    if not isinstance(dataset, str) or not isinstance(scene_key, str) or is_fetched(document):
        return None
    return dataset if DATASET_PATTERN.fullmatch(dataset) and KEY_PATTERN.fullmatch(scene_key) else None


def is_fetched(fields: Container[str]) -> bool:
    """Whether these are the fields of img2dataset, whose `url` is the picture's."""
    return all(name in fields for name in ("url", "key", "status"))


def _named(value: Any, field: str) -> Name:
    if value is None or value == "":
        return Name(None, field)
    if isinstance(value, int) and not isinstance(value, bool):
        return Name(str(value), field)
    if not isinstance(value, str):
        return Name(None, field, f"malformed_record: the scene id in `{field}` is {name_of(value)}; write it as text")
    if is_unicode(value):
        return Name(value, field)
    return Name(None, field, f"malformed_record: the scene id in `{field}` is not Unicode")


def sha256_of(document: Mapping[str, Any]) -> str | None:
    """`sha256` in lower case; None where it is not 64 hex digits."""
    value = document.get("sha256")
    return as_sha256(value) if isinstance(value, str) else None


def url_of(document: Mapping[str, Any]) -> str | None:
    """`url`, normalised; None where there is none."""
    value = document.get("url")
    if not isinstance(value, str) or not value.strip() or not is_unicode(value):
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
        for name, _ in guess_texts(list(document)):
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
    """A text, or an object that holds one and may name its role."""
    if isinstance(value, dict):
        role = value["role"] if value.get("role") in ROLES else role
        value = next((value[name] for name in ELEMENT_TEXTS if name in value), value)
    text, broken = text_of(value, f"`{field}`")
    return field, role, text, broken


# --- payloads -----------------------------------------------------------------------------------------------------


def _json(sample: Sample) -> tuple[Any, bytes | None, str | None]:
    """(the document, its raw bytes, what is wrong); an empty object where the sample has no json."""
    suffix = next((s for s in JSON_ENDS if s in sample), None)
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
        # One byte more than is allowed shows that there is more, without unpacking a decompression bomb.
        plain = gzip.GzipFile(fileobj=io.BytesIO(data)).read(TEXT_BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        return data, f"`{suffix}` is not whole gzip ({error})"
    if len(plain) > TEXT_BYTES_MAX:
        return None, f"`{suffix}` unpacks to more than {TEXT_BYTES_MAX >> 20} MiB"
    return plain, None
