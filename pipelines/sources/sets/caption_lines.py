"""Caption files of Flickr8k and Flickr30k that hold one caption a line, in four public forms.

  token        `1000092795.jpg#0<TAB>Two young guys ...`, as the authors published it
  piped        `1000092795.jpg| 0| Two young guys ...` below a header, Kaggle's results.csv
  comma        CSV with quotes below a header with `image` and `caption`, Kaggle's captions.txt
  annotations  CSV below a header with `raw`, a JSON list of the captions of one picture (flickr_annotations_30k.csv)

Invariant: every line below the header that is not blank gives at least one text. A text that is no caption of a
picture is marked broken. So is a caption that the next line seems to continue, as half of it would pass for a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.delimited import BOM, Malformed, encoded, read_csv
from pipelines.sources.formats.documents import NotJson, name_of, parse, text_of
from pipelines.sources.formats.lines import open_text, read_lines
from pipelines.sources.formats.names import listed
from pipelines.sources.formats.rows import MALFORMED_FIELD

TOKEN: Final = "token"
PIPED: Final = "piped"
COMMA: Final = "comma"
ANNOTATIONS: Final = "annotations"

PICTURE_COLUMNS: Final = ("image", "image_name", "filename")
CAPTION_COLUMNS: Final = ("caption", "comment", "raw")
SPLIT_COLUMN: Final = "split"

_BLOCK_BYTES: Final = 1 << 20
_PICTURE = re.compile(rb"[^\s/#|,\"]+\.(?:jpe?g|png)", re.IGNORECASE)
_ROW = re.compile(rb"\n\"?[^\s/#|,\"]+\.(?:jpe?g|png)\"?\s*,", re.IGNORECASE)
_TOKEN = re.compile(rb"(\S+)#(\d+)\t(.*)", re.DOTALL)
_PIPED = re.compile(rb"([^|]*?)\s*\|\s*(\d+)\s*\|\s?(.*)", re.DOTALL)
# One line of Kaggle's results.csv lacks its second separator: `2199200615.jpg| 4   A dog runs ...`.
_PIPED_ONCE = re.compile(rb"([^|]*?)\s*\|\s*(\d)\s+([^|]*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Caption:
    """One caption of a line.

    row: of the line below the header, from 0. picture: file name, None when the line names none. field: where in the
    line the text is. broken: `reason: detail`, or None. is_repaired: a missing separator was restored, as its place is
    clear.
    """

    row: int
    picture: str | None
    field: str
    text: bytes | None
    split: str | None = None
    broken: str | None = None
    is_repaired: bool = False


def form_of(source: Input) -> str:
    """TOKEN, PIPED, COMMA or ANNOTATIONS, by the first line. Raises InputError that shows the line."""
    first = next((line.rstrip(b"\r\n") for line in _lines(source)), b"")
    names = [name.strip().lower() for name in first.decode("latin-1").split("|")]
    if len(names) > 1 and names[0] in PICTURE_COLUMNS and names[-1] in CAPTION_COLUMNS:
        return PIPED
    names = [name.strip().lower() for name in first.decode("latin-1").split(",")]
    if set(names) & set(PICTURE_COLUMNS) and set(names) & set(CAPTION_COLUMNS):
        return ANNOTATIONS if "raw" in names else COMMA
    if _TOKEN.fullmatch(first) and b"\r" not in first:
        return TOKEN
    shown = "it is empty" if not first else f"its first line is {first[:80]!r}"
    if b"\r" in first:
        shown = "its lines end in CR alone; convert them, for example with `tr '\\r' '\\n'`"
    raise InputError(
        f"{source.uri} is no caption file of Flickr8k or Flickr30k: {shown}. "
        "Known are `NAME.jpg#0<TAB>caption`, `image,caption` and `image_name| comment_number| comment`."
    )


def captions(source: Input, form: str) -> Iterator[Caption]:
    """The captions of a file of that form, in the order of its lines."""
    if form in (TOKEN, PIPED):
        yield from _unfinished(_matched(source, form), form)
    else:
        yield from _tabular(source, is_list=form == ANNOTATIONS)


def ends_in_a_line(source: Input) -> bool:
    """Whether the last line has its line end; a file that was cut short seldom does."""
    with open_text(source) as file:
        last = b""
        while block := file.read(_BLOCK_BYTES):
            last = block
    return not last or last.endswith(b"\n")


def _lines(source: Input) -> Iterator[bytes]:
    for number, line in enumerate(read_lines(source)):
        line = line.removeprefix(BOM) if number == 0 else line
        if line.strip():
            yield line


def _matched(source: Input, form: str) -> Iterator[Caption]:
    is_header = form == PIPED
    for row, line in enumerate(read_lines(source), start=-1 if form == PIPED else 0):
        line = line.removeprefix(BOM).rstrip(b"\r\n")
        if not line.strip() or is_header:
            is_header = is_header and not line.strip()
            continue
        match = (_TOKEN if form == TOKEN else _PIPED).fullmatch(line)
        is_repaired = match is None and form == PIPED
        if is_repaired:
            match = _PIPED_ONCE.fullmatch(line)
        if match is None:
            yield _broken(row, line, f"no {_words(form)}")
            continue
        field = f"caption[{int(match[2])}]" if len(match[2]) < 4 else "caption"
        yield _named(Caption(row=row, picture=None, field=field, text=match[3], is_repaired=is_repaired), match[1])


def _broken(row: int, line: bytes, detail: str) -> Caption:
    return Caption(row=row, picture=None, field=MALFORMED_FIELD, text=line, broken=f"malformed_record: {detail}")


def _words(form: str) -> str:
    return "`NAME.jpg#0<TAB>caption`" if form == TOKEN else "`NAME.jpg| 0| caption`"


def _unfinished(every: Iterator[Caption], form: str) -> Iterator[Caption]:
    """A line break cuts the caption that holds it, so the line before one that does not parse is broken too."""
    before: Caption | None = None
    for caption in every:
        if before is not None:
            # The stray `.jpg.1#0` of Flickr8k names no picture either, but it is no continuation.
            goes_on = caption.field == MALFORMED_FIELD or (form == PIPED and caption.picture is None)
            if goes_on and before.broken is None:
                cut = "malformed_record: the next line is none of a caption, so this caption may go on in it"
                before = replace(before, broken=cut)
            yield before
        before = caption
    if before is not None:
        yield before


def _tabular(source: Input, *, is_list: bool) -> Iterator[Caption]:
    header, rows = read_csv(source, ",")
    names = [name.strip().lower() for name in header]
    picture = _place(source, names, PICTURE_COLUMNS)
    caption = _place(source, names, CAPTION_COLUMNS)
    split = names.index(SPLIT_COLUMN) if SPLIT_COLUMN in names else None
    for row, cells in enumerate(rows):
        if isinstance(cells, Malformed):
            yield _broken(row, cells.raw, cells.detail)
            continue
        named = None if split is None else encoded(cells[split]).decode("utf-8", "backslashreplace").strip()
        text = encoded(cells[caption])
        if _ROW.search(text):
            # A quote that is not closed makes other rows part of a caption; each of them is a text that is lost.
            for line in text.split(b"\n"):
                yield _broken(row, line, "a quote is not closed, so rows stand inside a caption")
            continue
        found = _listed(text, row) if is_list else [Caption(row=row, picture=None, field="caption", text=text)]
        for one in found:
            yield _named(replace(one, split=named), encoded(cells[picture]).strip())


def _place(source: Input, names: list[str], wanted: tuple[str, ...]) -> int:
    found = [place for place, name in enumerate(names) if name in wanted]
    if len(found) != 1:
        raise InputError(
            f"{source.uri} has {len(found)} columns that could be meant by {wanted[0]!r} ({listed(names)}). "
            f"One of {listed(wanted)} is needed."
        )
    return found[0]


def _listed(raw: bytes, row: int) -> Iterator[Caption]:
    """The texts of a JSON list in a cell."""
    try:
        value = parse(raw)
    except NotJson as error:
        value = error
    if not isinstance(value, list):
        detail = f"not JSON: {value}" if isinstance(value, NotJson) else f"{name_of(value)}, not a list of texts"
        yield Caption(row=row, picture=None, field="raw", text=raw, broken=f"malformed_record: `raw` is {detail}")
        return
    for place, element in enumerate(value):
        text, broken = text_of(element, f"`raw[{place}]`")
        yield Caption(row=row, picture=None, field=f"raw[{place}]", text=text, broken=broken)


def _named(caption: Caption, picture: bytes) -> Caption:
    """The caption with its picture, or broken when that is no file name of a picture."""
    if _PICTURE.fullmatch(picture) and picture.isascii():
        return replace(caption, picture=picture.decode())
    broken = f"malformed_record: {picture[:80].decode('utf-8', 'backslashreplace')!r} is no file name of a picture"
    return replace(caption, broken=caption.broken or broken, is_repaired=False)
