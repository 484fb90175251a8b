"""`--input` paths into input files: files, folders, globs and zip archives, local or by URL.

Invariant: the result depends on the files that there are, not on the order or form in which paths name them.
"""

from __future__ import annotations

import glob
import logging
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from infra import storage
from infra.errors import InputError
from infra.storage import archives
from pipelines.records import Input
from pipelines.sources.formats.names import nearest

_log = logging.getLogger(__name__)

HIDDEN: Final = (".", "_")
"""Hadoop and Spark begin names that are no data with these (`_SUCCESS`, `_temporary`); a path may still name them."""


def find_inputs(paths: Sequence[str], reads: Callable[[str], bool] | None = None) -> tuple[str, list[Input]]:
    """The folder that contains all files, and the files with their path in it, sorted by that path.

    A path that exists is taken as it is, else it is a glob (`*`, `**`, `?`, `[..]`). A folder stands for the files
    below it, a zip archive for its members that the source reads, named `archive.zip/member`; they are not unpacked. A
    file with two local names (a link) is one input. reads: whether the source reads a file of this base name; others
    in folders are no inputs, so that a README beside the data changes nothing. Raises InputError when a path matches
    nothing, or names a file that the source does not
    read.
    """
    found: dict[str, str] = {}
    inside: dict[str, list[str]] = {}
    for path in paths:
        for url in _expand(path):
            if reads is not None and not reads(posixpath.basename(url)):
                held = _held(url, reads, is_named=url == storage.absolute(path))
                if not held and url == storage.absolute(path):
                    holds = ", and holds none" if url.lower().endswith(archives.ENDING) else ""
                    raise InputError(
                        f"The input {path} is no file that this source reads, by its name{holds}. "
                        "Leave it out, or name another source."
                    )
                if not held:
                    continue
                inside[url] = held
            found[_real(url)] = min(url, found.get(_real(url), url))
    if not paths:
        raise InputError("No input was named. Name files, folders or globs with `--input`.")
    if not found:
        raise InputError(
            f"Nothing in {', '.join(paths)} is a file that this source reads, by its name. "
            "Check the folder, or name another source."
        )
    urls = sorted(found.values())
    root = _common_folder(urls)
    prefix = root.rstrip("/") + "/"
    files = []
    for url in urls:
        uri = url.removeprefix(prefix)
        if url in inside:
            files += [Input(uri=f"{uri}/{name}", url=archives.member_url(url, name)) for name in inside[url]]
        else:
            files.append(Input(uri=uri, url=url))
    if inside:
        _refuse_twice(files)
    return root, sorted(files, key=lambda file: file.uri)


def _held(url: str, reads: Callable[[str], bool], *, is_named: bool) -> list[str]:
    """Members of a zip archive that the source reads, sorted; none when it is no archive.

    A damaged archive that was found in a folder is left out, like other files; one that was named is an InputError.
    """
    if not url.lower().endswith(archives.ENDING):
        return []
    try:
        names = sorted(storage.archive_directory(url))
    except InputError as error:
        if is_named:
            raise
        _log.warning("%s is left out: %s", url, error)
        return []
    return [n for n in names if reads(posixpath.basename(n)) and not any(_is_hidden(p) for p in n.split("/"))]


def _refuse_twice(files: Sequence[Input]) -> None:
    """Raises InputError for a file beside the archive that holds it: each of its scenes would be read twice."""
    packed: dict[tuple[str, int], str] = {}
    bases = Counter(posixpath.basename(file.uri) for file in files)
    alike = [file for file in files if bases[posixpath.basename(file.uri)] > 1]
    # Members of archives first, so that a loose file is compared with every archive.
    for file in sorted(alike, key=lambda file: not archives.is_member(file.url)):
        key = (posixpath.basename(file.uri), storage.size(file.url))
        if key in packed:
            raise InputError(
                f"{packed[key]} and {file.uri} have one name and one size: the archive and what was unpacked from it? "
                "Name one of them."
            )
        if archives.is_member(file.url):
            packed[key] = file.uri


def _real(url: str) -> str:
    return url if storage.is_remote(url) else os.path.realpath(url)


def _expand(path: str) -> list[str]:
    if not path:
        raise InputError("An input is the empty text; an unset shell variable? Name a file, a folder or a glob.")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InputError(f"The name {path!r} is not UTF-8, and rows could not carry it. Rename the file.") from None
    url = storage.absolute(path)
    if storage.exists(url):
        return _files(url, path)
    if not glob.has_magic(path):
        raise InputError(f"There is no file or folder {url}.{_near(url)} Check the path.")
    # As in a shell: `*` does not match hidden names, but `.*` and `_*` do.
    pattern_hides = not posixpath.basename(url).startswith(HIDDEN)
    matches = [match for match in storage.glob(url) if not (pattern_hides and _is_hidden(posixpath.basename(match)))]
    found = [file for match in matches for file in _files(match, path)]
    if not found:
        fixed = url[: min(url.find(c) for c in "*?[" if c in url)].rpartition("/")[0]
        there = f"The folder {fixed} is there" if storage.exists(fixed) else f"There is no folder {fixed}"
        raise InputError(
            f"The input {path} matches no file (looked for {url}). {there}; check the pattern, and quote it so that "
            "the shell leaves it alone."
        )
    return found


def _files(url: str, path: str) -> list[str]:
    """The file itself, or the files below the folder. Raises InputError for a folder without any."""
    if not storage.is_folder(url):
        return [url]
    names = [name for name in storage.list_files(url) if not any(_is_hidden(part) for part in name.split("/"))]
    if not names:
        message = (
            f"The folder {url} (input {path}) holds no files, those that begin with `.` or `_` aside. Check the path."
        )
        raise InputError(message)
    return [storage.join(url, name) for name in names]


def _is_hidden(name: str) -> bool:
    return name.startswith(HIDDEN) or name.endswith(storage.TEMPORARY_SUFFIX)


def _near(url: str) -> str:
    folder, _, name = url.rpartition("/")
    return nearest(name, storage.list_names(folder)) if storage.exists(folder or "/") else ""


def _common_folder(urls: Sequence[str]) -> str:
    """The deepest folder that contains all. Raises InputError for different stores."""
    stores = sorted({_store(url) for url in urls})
    if len(stores) > 1:
        raise InputError(
            f"The inputs are in different places ({', '.join(s or 'local files' for s in stores)}), so no folder "
            "contains them all. Ingest them as two datasets, or copy them together."
        )
    store = stores[0]
    return store + os.path.commonpath([posixpath.dirname(url[len(store) :]) or "/" for url in urls])


def _store(url: str) -> str:
    """`s3://bucket` for a URL, the empty text for a local path."""
    if not storage.is_remote(url):
        return ""
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.split('/', 1)[0]}"
