"""Find the images of scenes in good tars, or in folders and tars by the address that a scene records.

Invariant: every image that a scene names is either yielded or listed as missing, with a reason. `embed.worker` decodes.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from infra import storage
from infra.errors import InputError

MEMBER: Final = re.compile(r"(?P<key>[a-z0-9][a-z0-9_-]{0,63})(\.f(?P<frame>[0-9]{3,}))?\.jpg")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One encoded image of a scene. item: its frame, 0 when it has none."""

    scene_key: str
    item: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Missing:
    """An image that could not be embedded. uri: as the scene records it."""

    scene_key: str
    item: int
    uri: str | None
    why: str


def holds_pictures(tar_url: str) -> bool:
    """Whether the first sample of a good tar has an image; images come before the JSON of their sample."""
    with storage.open_read(tar_url) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.name.endswith(".json"):
                return False
            if MEMBER.fullmatch(member.name):
                return True
    return False


def sources_digest(paths: Sequence[str]) -> str:
    """sha256 over what --images names: tars by their bytes, folders by the names and sizes of their files.

    Raises InputError for a path that is not there.
    """
    sha = hashlib.sha256()
    for url in map(storage.absolute, paths):
        if storage.is_folder(url):
            names = storage.list_files(url)
            if not names:
                raise InputError(
                    f"--images {url} is an empty folder, so no scene would find its picture. Check the path."
                )
            # Names and sizes only: a folder may hold millions of images, and reading them all would cost hours.
            for name in names:
                sha.update(f"{name}\0{storage.size(storage.join(url, name))}\n".encode())
        else:
            sha.update(f"{storage.digest(url).sha256}\n".encode())
    return sha.hexdigest()


class PictureIndex:
    """Files of folders and members of tars by name, each read when it is asked for. paths: as --images names them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._places: dict[str, tuple[str, int, int]] = {}
        self._base: dict[str, str | None] = {}
        for url in map(storage.absolute, paths):
            entries = _folder(url) if storage.is_folder(url) else _tar(url)
            for name, place in entries:
                self._places.setdefault(name, place)
        # Datasets often record a URL or a path of another machine, of which only the base name is the same here.
        for name in self._places:
            base = name.rsplit("/", 1)[-1]
            self._base[base] = None if base in self._base else name  # None: several files have this base name

    def read(self, uri: str) -> tuple[bytes | None, str]:
        """(bytes, "") of the file of that name or, if it is unique, of that base name; else (None, reason)."""
        name = uri.removeprefix("./")
        base = name.rsplit("?", 1)[0].rsplit("/", 1)[-1]
        if name not in self._places:
            if base not in self._base:
                return None, "no file of --images has this name"
            found = self._base[base]
            if found is None:
                return None, "several files of --images have this base name"
            name = found
        url, start, size = self._places[name]
        return (storage.read_range(url, start, start + size) if size else b""), ""


def _folder(url: str) -> Iterator[tuple[str, tuple[str, int, int]]]:
    for name in storage.list_files(url):
        path = storage.join(url, name)
        yield name, (path, 0, storage.size(path))


def _tar(url: str) -> Iterator[tuple[str, tuple[str, int, int]]]:
    try:
        with storage.open_read(url) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile():
                    yield member.name.removeprefix("./"), (url, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise InputError(
            f"--images {url} is neither a folder nor an uncompressed tar ({error}). Unpack it, or name its folder."
        ) from error


def tar_pictures(tar_url: str) -> Iterator[Picture]:
    """The images of a good tar, in the order of its samples."""
    with storage.open_read(tar_url) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if match := MEMBER.fullmatch(member.name):
                opened: Any = tar.extractfile(member)
                yield Picture(scene_key=match["key"], item=int(match["frame"] or 0), data=opened.read())


def pictures_of(
    scenes: pa.Table, tar_url: str | None, index: PictureIndex | None, missing: list[Missing]
) -> Iterator[Picture]:
    """Each image of the scenes once; those that are not found are added to `missing`.

    scenes: columns scene_key and images. index: of --images, None to read the good tar instead.
    """
    wanted = _wanted(scenes)
    if index is None:
        if tar_url is not None:
            for picture in tar_pictures(tar_url):
                wanted.pop((picture.scene_key, picture.item), None)
                yield picture
        missing += [_lost(key, uris, "the good tar holds no such picture") for key, uris in wanted.items()]
        return
    for key, uris in wanted.items():
        data, why = None, "the scene names no picture"
        for uri in uris:
            data, why = index.read(uri)
            if data is not None:
                yield Picture(scene_key=key[0], item=key[1], data=data)
                break
        if data is None:
            missing.append(_lost(key, uris, why))


def _wanted(scenes: pa.Table) -> dict[tuple[str, int], list[str]]:
    """(scene_key, item) -> addresses of that image; a scene that names no image is expected to have item 0."""
    wanted: dict[tuple[str, int], list[str]] = {}
    for row in scenes.select(["scene_key", "images"]).to_pylist():
        for image in row["images"] or [{"frame": None, "uri": None}]:
            uris = wanted.setdefault((row["scene_key"], image["frame"] or 0), [])
            if image["uri"]:
                uris.append(image["uri"])
    return wanted


def _lost(key: tuple[str, int], uris: list[str], why: str) -> Missing:
    return Missing(scene_key=key[0], item=key[1], uri=uris[0] if uris else None, why=why)
