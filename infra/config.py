"""From TOML and `--set a.b=v` to one frozen, keyword-only (nested) dataclass, and from that to a manifest.

Invariant: a key that no field takes, or a value that is not of the field's type, never passes. Types are strict: `1` is
no bool, `true` no int, `"5"` no number; an int is a float. Later `--set` wins over earlier, and over the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

from infra import storage
from infra.errors import ConfigError, InputError

Config = TypeVar("Config")
Plain = dict[str, Any]
Value: TypeAlias = bool | int | float | str
Settings: TypeAlias = Mapping[str, Value | Sequence[Value] | None]
"Values by dotted key, as a program gives them instead of `--set`; None is a key that is left out."

_UNKNOWN_KEY = "unexpected_keyword_argument"
_WORDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string (in quotes, in a file)",
    "tuple_type": 'a list, such as [1, 2] or ["a", "b"]',
    "list_type": 'a list, such as [1, 2] or ["a", "b"]',
    "dict_type": "a table",
    "dataclass_type": "a table",
}


def load(cls: type[Config], *, file: str | None = None, sets: Sequence[str] = ()) -> Config:
    """An instance of the dataclass `cls` from its defaults, then `file` (TOML, path or URL), then `sets` (`a.b=v`).

    A `v` that is no TOML value is taken as a string, and a field that is only text takes `v` as it is written.
    Raises ConfigError with one sentence that names the key by its dotted path, and the nearest one if there is none.
    """
    merged = _read(file) if file is not None else {}
    origins: dict[tuple[str, ...], str] = {}
    for text in sets:
        path, raw = _split(text)
        origin = f"in `--set {text}`"
        _put(merged, path, _parse(raw, _annotation_at(cls, path, origin)))
        origins[path] = origin
    return _validated(cls, merged, origins, default_origin=f"in {file}" if file is not None else "in the config")


def to_sets(settings: Settings | None) -> list[str]:
    """Settings in the form that `load` takes, `a.b=v`."""
    # JSON of these values is TOML.
    given = [(key, value) for key, value in (settings or {}).items() if value is not None]
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given]


def to_dict(config: object) -> Plain:
    """The config as plain JSON values with sorted keys, for manifests; equal configs give equal dictionaries.

    Raises ConfigError for a value that JSON cannot hold (such as `inf`), because it would be lost silently.
    """
    plain = _plain(config, "")
    if not isinstance(plain, dict):
        raise ConfigError(f"A {type(config).__name__} is not a config: only dataclasses are. Pass the config object.")
    return plain


def _read(file: str) -> Plain:
    try:
        text = storage.read_bytes(file).decode("utf-8")
    except (InputError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the config {file}: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The config {file} is not TOML: {error}. Correct that line.") from error


def _split(text: str) -> tuple[tuple[str, ...], str]:
    key, equals, raw = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"`--set {text}` is not of the form KEY=VALUE. Write for example `--set source.scenes=2000`.")
    return path, raw.strip()


def _parse(raw: str, annotation: Any) -> Any:
    try:
        parsed = tomllib.loads(f"v = {raw}") if "\n" not in raw else {}
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed.get("v", raw) if len(parsed) == 1 else raw
    if isinstance(value, str):
        return value
    # TOML would read `2014` as a number, `2026-11-30` as a date, and `5#3` as 5 with a comment.
    if _is_text_only(annotation) or ("#" in raw and not isinstance(value, (list, dict))):
        return raw
    return value


def _put(data: Plain, path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    data[path[-1]] = value


def _annotation_at(cls: Any, path: tuple[str, ...], origin: str) -> Any:
    """The annotation of the field that a dotted path names; Any below a mapping without declared values."""
    annotation: Any = cls
    for depth, name in enumerate(path):
        section = _section(annotation)
        if section is None:
            values = [get_args(m)[1] for m in _members(annotation) if len(get_args(m)) == 2 and _is_mapping(m)]
            if not values and Any not in _members(annotation):
                above = ".".join(path[:depth])
                message = f"The config has no key {'.'.join(path)!r} ({origin}): {above!r} is a value, not a section."
                raise ConfigError(message)
            annotation = values[0] if values else Any
            continue
        hints = _hints(section)
        if name not in hints:
            raise _unknown(path[: depth + 1], hints, origin)
        annotation = hints[name]
    if _section(annotation) is not None:
        known = ", ".join(sorted(_hints(_section(annotation))))
        message = f"{'.'.join(path)!r} is a section, not a value ({origin}). Set one of its keys: {known}."
        raise ConfigError(message)
    return annotation


def _unknown(path: tuple[str, ...], known: Collection[str], origin: str) -> ConfigError:
    near = difflib.get_close_matches(path[-1].replace("-", "_"), list(known), n=1, cutoff=0.5)
    above = ".".join(path[:-1])
    hint = f"Did you mean {'.'.join([*path[:-1], near[0]])!r}?" if near else f"Known keys: {', '.join(sorted(known))}."
    place = f"section {above!r}" if above else "config"
    return ConfigError(f"The {place} has no key {'.'.join(path)!r} ({origin}). {hint}")


def _validated(
    cls: type[Config], data: Plain, origins: Mapping[tuple[str, ...], str], *, default_origin: str
) -> Config:
    # 0.1 s, and a config is only needed once a command runs.
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from pydantic_core import to_json

    # A plain dataclass takes no settings itself, but it inherits those of the tuple around it, at any depth.
    adapter = TypeAdapter(tuple[cls], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]
    # JSON mode, because a strict dataclass takes no dictionary and a strict tuple no list from Python objects.
    text = to_json([data], inf_nan_mode="constants")
    try:
        return adapter.validate_json(text)[0]
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown key first: it is often the reason why a needed one is missing.
        problem = next((p for p in problems if p["type"] == _UNKNOWN_KEY), problems[0])
        place = tuple(str(part) for part in problem["loc"][1:])
        known = [path for path in origins if place[: len(path)] == path or path[: len(place)] == place]
        origin = origins[known[-1]] if known else default_origin
        if problem["type"] == _UNKNOWN_KEY:
            *above, name = place
            keys, section = _locate(cls, above)
            raise _unknown((*keys, name), _hints(_section(section)), origin) from error
        raise ConfigError(_sentence(problem, ".".join(_locate(cls, place)[0]), origin)) from error


def _locate(cls: Any, place: Sequence[str]) -> tuple[list[str], Any]:
    """Names and annotation of a pydantic location, without the names of union members that pydantic adds to it."""
    names: list[str] = []
    annotation: Any = cls
    for name in place:
        section = _section(annotation)
        if section is not None and name in _hints(section):
            annotation = _hints(section)[name]
        elif mappings := [member for member in _members(annotation) if _is_mapping(member)]:
            annotation = get_args(mappings[0])[1]
        elif name.isdigit():
            annotation = next((get_args(m)[0] for m in _members(annotation) if get_args(m)), Any)
        else:
            continue
        names.append(name)
    return names, annotation


def _sentence(problem: Mapping[str, Any], key: str, origin: str) -> str:
    kind, message = str(problem["type"]), str(problem["msg"])
    if kind == "missing":
        return f"The config needs the key {key!r}, and it is not set. Set it in the file or with `--set {key}=VALUE`."
    if kind in ("value_error", "assertion_error"):
        reason = message.partition(", ")[2] or message
        return f"The config{f' section {key!r}' if key else ''} is wrong: {reason}"
    wanted = _WORDS.get(kind) or message.removeprefix("Input should be ").removeprefix("a valid ")
    return f"The config key {key!r} is {problem['input']!r} ({origin}), but must be {wanted}. Change that value."


def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, through Annotated; else the annotation alone."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for a in get_args(annotation) for m in _members(a)]
    return [annotation]


def _section(annotation: Any) -> Any:
    """The dataclass among the members of an annotation, or None."""
    found = [m for m in _members(annotation) if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if len(found) > 1:
        raise TypeError(
            f"A config field holds one dataclass, {annotation} names {len(found)}: keys could not be checked."
        )
    return found[0] if found else None


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_text_only(annotation: Any) -> bool:
    members = [m for m in _members(annotation) if m is not type(None)]
    literals = [a for m in members if get_origin(m) is typing.Literal for a in get_args(m)]
    classes = [m for m in members if get_origin(m) is not typing.Literal]
    return all(isinstance(a, str) for a in literals) and all(
        isinstance(m, type) and issubclass(m, (str, os.PathLike)) for m in classes
    )


def _plain(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = sorted(f.name for f in dataclasses.fields(value))
        return {name: _plain(getattr(value, name), f"{key}.{name}".lstrip(".")) for name in names}
    if isinstance(value, enum.Enum):
        return _plain(value.value, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"The config key {key!r} is {value}, which a manifest cannot hold. Give a finite number.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"The config key {key!r} is {value}, which does not fit 64 bits. Give a smaller number.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name], f"{key}.{name}") for name in sorted(value, key=str)}
    if isinstance(value, (frozenset, set)):
        return sorted((_plain(v, key) for v in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(v, f"{key}.{i}") for i, v in enumerate(value)]
    message = f"The config key {key!r} holds a {type(value).__name__}, which a manifest cannot hold. Use plain values."
    raise ConfigError(message)
