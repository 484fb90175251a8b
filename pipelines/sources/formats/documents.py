"""JSON files and lines: strict syntax, with texts as bytes even where they are not Unicode.

Invariant: a text that is not Unicode (a lone surrogate escape, a Windows-1252 byte) comes out as bytes that are not
UTF-8, so that cleaning rejects that one text; it neither fails the file nor becomes another text (A10).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import orjson

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.lines import read_all, read_lines


class NotJson(ValueError):
    """The bytes are not JSON; the message says where."""


def parse(data: bytes) -> Any:
    """The value of one JSON document. Texts that are not Unicode hold surrogates; see `encode`. Raises NotJson."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    # Slower, but it also takes lone surrogates and, by surrogateescape, bytes outside UTF-8.
    try:
        return json.loads(data.decode("utf-8-sig", "surrogateescape"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not JSON")


def encode(text: str) -> bytes:
    """UTF-8 of a text out of `parse`; where that is impossible, the bytes that the file held, which are not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        pass
    try:
        raw = text.encode("utf-8", "surrogateescape")
        raw.decode()
    except UnicodeDecodeError:
        return raw
    except UnicodeEncodeError:
        pass
    # surrogateescape would turn escapes such as \\udcc3\\udca9 into legal UTF-8 that is not in the file.
    return text.encode("utf-8", "surrogatepass")


def is_unicode(text: str) -> bool:
    """Whether a text out of `parse` holds no surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def show(value: Any) -> bytes | None:
    """The JSON of a value, for the text of a reject; None where it is nested too deeply to be written."""
    try:
        return encode(json.dumps(value, ensure_ascii=False))
    except TypeError:
        return encode(str(value))  # a date of a parquet column
    except RecursionError:
        return None  # orjson parses more nested lists than json writes


def text_of(value: Any, name: str) -> tuple[bytes | None, str | None]:
    """(bytes, None) of a text and (None, None) of null; of anything else its JSON and the reason of the reject."""
    if value is None or isinstance(value, bytes):
        return value, None
    if isinstance(value, str):
        return encode(value), None
    return show(value), f"malformed_record: {name} is {name_of(value)}, not a text"


def text_in(value: Any, member: str, what: str) -> tuple[bytes | None, str | None]:
    """`text_of` for the caption under `member` of an object; `what`: names the object in the reason of the reject."""
    if isinstance(value, dict):
        return text_of(value.get(member), "the caption")
    return show(value), f"malformed_record: the {what} is {name_of(value)}, not an object"


def name_of(value: Any) -> str:
    """The kind of a JSON value, or of a value of a parquet column, in words."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def load(source: Input) -> Any:
    """The JSON document that is the whole input. Raises InputError when it is not one."""
    data = read_all(source)
    try:
        return parse(data)
    except NotJson as error:
        head = f"It begins with {data[:24]!r}." if data else "It is empty."
        raise InputError(f"{source.uri} is not JSON: {error}. {head} Was it cut short? Fetch it again.") from error


def json_lines(source: Input) -> Iterator[tuple[int, bytes, dict[str, Any] | str]]:
    """(line number from 0, raw line, its object or what is wrong with it) for each line that is not blank."""
    for number, line in enumerate(read_lines(source)):
        raw = line.rstrip(b"\r\n")
        if not raw.strip():
            continue
        try:
            value = parse(raw)
        except NotJson as error:
            yield number, raw, f"not JSON: {error}"
            continue
        yield number, raw, value if isinstance(value, dict) else f"the line is {name_of(value)}, not an object"
