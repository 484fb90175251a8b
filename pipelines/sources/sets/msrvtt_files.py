"""Annotation files of MSR-VTT, and the list of the 1,000 test clips of 1k-A.

Invariant: a sentence is a text of the clip that it names, in the order of its `sen_id`. A sentence that names no listed
clip is a text that is marked broken.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from catalog.schema import SPLIT_PATTERN
from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.delimited import Malformed, encoded, read_csv
from pipelines.sources.formats.documents import encode, load, name_of, text_in
from pipelines.sources.formats.lines import read_lines
from pipelines.sources.formats.names import listed
from pipelines.sources.formats.rows import MALFORMED_FIELD, Text
from pipelines.sources.sets.coco_layouts import Picture

LIST_COLUMNS: Final = ("video_id", "sentence")
SEPARATORS: Final = (",", ";", "\t")

_NUMBER = re.compile(r"video([0-9]{1,9})")
_CLIP = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class Clip(Picture):
    """One record. row: its place in `videos`. uri: address of the clip. video: address of the whole video.

    An orphan is a sentence of an unlisted clip.
    """

    video: str | None = None
    is_of_list: bool = False

    @property
    def number(self) -> int | None:
        """12 of `video12`."""
        match = _NUMBER.fullmatch(self.id or "")
        return int(match[1]) if match else None


def is_annotation(name: str) -> bool:
    """Whether a file of this base name, without `.gz`, may hold annotations."""
    return name.lower().endswith(".json")


def is_list(name: str) -> bool:
    """Whether it may be a list of clips."""
    return name.lower().endswith(".csv")


def clips_of(source: Input, *, file_is_list: bool) -> Iterator[Clip]:
    """The clips in the order of the file, then orphans. Raises InputError for a file in another layout."""
    if file_is_list:
        yield from _of_list(source)
        return
    document = load(source)
    videos = document.get("videos") if isinstance(document, dict) else None
    sentences = document.get("sentences", []) if isinstance(document, dict) else None
    if not isinstance(videos, list) or not isinstance(sentences, list):
        found = f"an object with {listed(list(document))}" if isinstance(document, dict) else name_of(document)
        raise InputError(f"{source.uri} is {found}; MSR-VTT needs an object with the lists `videos` and `sentences`.")
    if not videos:
        raise InputError(f"{source.uri} lists no clip (`videos` is empty). Fetch the annotations again.")
    clips = [_clip(video, row, source) for row, video in enumerate(videos)]
    known = {clip.id for clip in clips}
    if len(known) < len(clips):
        raise InputError(f"{source.uri} lists a clip twice, so its split is not clear. Is the file two files joined?")
    texts, orphans = _sentences(sentences, known)
    for clip in clips:
        ordered = sorted(texts.get(clip.id, []), key=lambda found: found[0])
        clip.texts.extend((f"caption[{n}]", "human", text, broken) for n, (_, text, broken) in enumerate(ordered))
        yield clip
    yield from orphans


def _clip(video: Any, row: int, source: Input) -> Clip:
    id_ = video.get("video_id") if isinstance(video, dict) else None
    if not isinstance(id_, str) or not _CLIP.fullmatch(id_):
        raise InputError(f"videos[{row}] of {source.uri} has no `video_id`, so no sentence can name it. Is it MSR-VTT?")
    split = video.get("split")
    if not isinstance(split, str) or not SPLIT_PATTERN.fullmatch(split):
        raise InputError(f"videos[{row}] of {source.uri} ({id_}) has the split {split!r}; a split name is needed.")
    url = video.get("url")
    uri = as_url(encode(url)) if isinstance(url, str) else None
    times = [video.get("start time"), video.get("end time")]
    clip = uri
    if uri is not None and all(isinstance(t, (int, float)) and not isinstance(t, bool) for t in times):
        # A temporal media fragment: W3C Media Fragments URI 1.0, 4.2.1.
        clip = f"{uri}#t={times[0]},{times[1]}"
    return Clip(row=row, id=id_, split=split, uri=clip, video=uri)


def _sentences(sentences: list[Any], known: set[str | None]) -> tuple[dict[str | None, list[Any]], list[Clip]]:
    """((order, text, broken) by clip; the sentences that name no listed clip)."""
    texts: dict[str | None, list[Any]] = defaultdict(list)
    orphans = []
    for place, sentence in enumerate(sentences):
        id_ = sentence.get("video_id") if isinstance(sentence, dict) else None
        text, broken = text_in(sentence, "caption", "sentence")
        if id_ in known and isinstance(id_, str):
            number = sentence.get("sen_id")
            number = number if isinstance(number, int) and not isinstance(number, bool) else len(sentences) + place
            texts[id_].append(((number, place), text, broken))
            continue
        if broken is None:
            broken = f"missing_image: the sentence names the clip {id_!r}, which `videos` does not list"
        orphans.append(Clip(row=place, id=None, split="", texts=[("sentences", "human", text, broken)], is_orphan=True))
    return texts, orphans


def listed_clips(source: Input) -> dict[str, bytes]:
    """Clip -> caption of a list. Raises InputError for a line that does not parse, and for a clip that stands twice."""
    found: dict[str, bytes] = {}
    for clip in _of_list(source):
        _, _, text, broken = clip.texts[0]
        if broken is not None or clip.id is None or not text:
            raise InputError(
                f"Row {clip.row + 1:,} of {source.uri} names no clip and caption ({broken or 'empty'}), so it is not "
                "clear which clips are test. Fetch the list again."
            )
        if clip.id in found:
            raise InputError(f"{source.uri} names {clip.id} twice; 1k-A has one caption a clip. Remove one.")
        found[clip.id] = text
    return found


def _of_list(source: Input) -> Iterator[Clip]:
    """The rows of a list as clips of the split test, each with one caption."""
    names, rows = read_csv(source, _separator(source))
    clip, sentence = (names.index(name) for name in LIST_COLUMNS)
    for row, cells in enumerate(rows):
        if isinstance(cells, Malformed):
            text: Text = (MALFORMED_FIELD, "human", cells.raw, f"malformed_record: {cells.detail}")
            yield Clip(row=row, id=None, split="test", texts=[text], is_of_list=True)
            continue
        id_ = encoded(cells[clip]).decode("utf-8", "backslashreplace")
        broken = None if _CLIP.fullmatch(id_) else f"malformed_record: {id_[:80]!r} is no clip"
        text = ("sentence", "human", encoded(cells[sentence]), broken)
        yield Clip(row=row, id=None if broken else id_, split="test", texts=[text], is_of_list=True)


def _separator(source: Input) -> str:
    """The separator of the header; public copies have `,` or `;`."""
    header = next(read_lines(source), b"").decode("latin-1").removeprefix("\xef\xbb\xbf").rstrip("\r\n")
    for separator in SEPARATORS:
        if set(LIST_COLUMNS) <= {name.strip('"') for name in header.split(separator)}:
            return separator
    raise InputError(
        f"{source.uri} is no list of clips with captions: its first line is {header[:80]!r}, and the columns "
        f"{' and '.join(LIST_COLUMNS)} are needed. Name MSRVTT_JSFUSION_test.csv."
    )
