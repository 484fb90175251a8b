"""The three layouts of COCO captions, parsed into pictures with their texts.

Invariant: every annotation, sentence or list entry is one text of exactly one picture. An entry that belongs to no
listed picture, or does not parse, is a text that is marked broken. A picture without a name fails the file, because
its captions could not be kept apart from those of others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from catalog.schema import SPLIT_PATTERN
from infra.errors import InputError
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.documents import encode, name_of, show, text_in, text_of
from pipelines.sources.formats.names import listed, picture_id
from pipelines.sources.formats.rows import Text

OFFICIAL: Final = "official"
KARPATHY: Final = "Karpathy"
BLIP: Final = "BLIP list"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One record. row: its place in `images` (or in the list). An orphan is an annotation of an unlisted picture."""

    row: int
    id: str | None
    split: str
    uri: str | None = None
    width: int | None = None
    height: int | None = None
    texts: list[Text] = field(default_factory=list)
    is_orphan: bool = False


def layout_of(document: Any, *, uri: str) -> str:
    """OFFICIAL, KARPATHY or BLIP. Raises InputError for another one, with what was found."""
    if isinstance(document, dict) and isinstance(images := document.get("images"), list):
        annotations = document.get("annotations")
        if isinstance(annotations, list) and any(isinstance(a, dict) and "caption" in a for a in annotations):
            return OFFICIAL
        if any(isinstance(image, dict) and "sentences" in image for image in images):
            return KARPATHY
    if isinstance(document, list) and any(isinstance(e, dict) and "image" in e and "caption" in e for e in document):
        return BLIP
    found = f"an object with {listed(list(document))}" if isinstance(document, dict) else name_of(document)
    raise InputError(
        f"{uri} is {found}, but holds no captions in a layout of COCO. Name `captions_*.json`, Karpathy's "
        "`dataset_*.json` or BLIP's `coco_karpathy_*.json`."
    )


def dataset_of(document: Any) -> str | None:
    """The dataset that Karpathy's file names; None when it names none, or is in another layout."""
    name = document.get("dataset") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def pictures(document: Any, *, uri: str, split: str) -> Iterator[Picture]:
    """The pictures in the order of the file, then the orphans. split: for layouts that do not name it themselves."""
    layout = layout_of(document, uri=uri)
    if layout == OFFICIAL:
        yield from _official(document, uri=uri, split=split)
    elif layout == KARPATHY:
        for row, image in enumerate(document["images"]):
            yield _karpathy(image, row, uri=uri)
    else:
        for row, entry in enumerate(document):
            yield _blip(entry, row, split=split)


def _official(document: dict[str, Any], *, uri: str, split: str) -> Iterator[Picture]:
    ids = [_official_id(image, row, uri=uri) for row, image in enumerate(document["images"])]
    known = set(ids)
    if len(known) < len(ids):
        twice = next(id_ for id_, times in Counter(ids).items() if times > 1)
        raise InputError(
            f"`images` of {uri} lists the id {twice} twice, so it is not clear which picture its captions describe. "
            "Is the file two files joined?"
        )
    texts: dict[str, list[tuple[Any, bytes | None, str | None]]] = defaultdict(list)
    orphans = []
    seen: set[Any] = set()
    for place, annotation in enumerate(document["annotations"]):
        image = _id(annotation.get("image_id")) if isinstance(annotation, dict) else None
        text, broken = text_in(annotation, "caption", "annotation")
        if image is None:
            broken = broken or "malformed_record: the annotation names no image"
        elif image not in known:
            broken = (
                f"missing_image: annotation {annotation.get('id')} names image {image}, which `images` does not list"
            )
        else:
            # Without the place, which is the last part: annotations without an id are never repeats.
            key = _order(annotation.get("id"), place)[:2]
            if key in seen:
                broken = f"malformed_record: the annotation id {annotation.get('id')} stands twice"
            seen.add(key)
        if image is None or image not in known:
            orphans.append(
                Picture(row=place, id=None, split=split, texts=[("annotations", "human", text, broken)], is_orphan=True)
            )
        else:
            texts[image].append((_order(annotation.get("id"), place), text, broken))
    for row, (image, entry) in enumerate(zip(ids, document["images"], strict=True)):
        ordered = sorted(texts.get(image, []), key=lambda found: found[0])
        yield Picture(
            row=row,
            id=image,
            split=split,
            uri=_uri(entry.get("file_name")),
            width=_pixels(entry.get("width")),
            height=_pixels(entry.get("height")),
            texts=[(f"caption[{n}]", "human", text, broken) for n, (_, text, broken) in enumerate(ordered)],
        )
    yield from orphans


def _official_id(image: Any, row: int, *, uri: str) -> str:
    id_ = _id(image.get("id")) if isinstance(image, dict) else None
    if id_ is None:
        raise InputError(f"images[{row}] of {uri} has no id, so no caption can name it. Is it a captions file of COCO?")
    return id_


def _order(id_: Any, place: int) -> tuple[int, Any, int]:
    """Sorts by number, then by other ids as text, then by place for annotations without one."""
    # The first part separates the kinds of ids, which Python cannot compare with one another.
    if isinstance(id_, int):
        return 0, id_, place
    return (2, place, place) if id_ is None else (1, str(id_), place)


def _karpathy(image: Any, row: int, *, uri: str) -> Picture:
    if not isinstance(image, dict) or not isinstance(name := image.get("filename"), str):
        raise InputError(f"images[{row}] of {uri} has no `filename`, so its captions name no picture.")
    split, sentences = image.get("split"), image.get("sentences")
    if not isinstance(split, str) or not SPLIT_PATTERN.fullmatch(split) or not isinstance(sentences, list):
        raise InputError(
            f"images[{row}] of {uri} ({name}) has split {split!r} and {name_of(sentences)} of sentences; "
            "a split name and a list are needed."
        )
    found = []
    for place, sentence in enumerate(sentences):
        id_ = sentence.get("sentid") if isinstance(sentence, dict) else None
        found.append((_order(id_, place), *text_in(sentence, "raw", "sentence")))
    found.sort(key=lambda sentence: sentence[0])
    path = image.get("filepath")
    return Picture(
        row=row,
        id=_id(image.get("cocoid")) or picture_id(as_url(encode(name))),
        split=split,
        uri=_uri(f"{path}/{name}" if isinstance(path, str) and path else name),
        texts=[(f"sentences[{n}]", "human", text, broken) for n, (_, text, broken) in enumerate(found)],
    )


def _blip(entry: Any, row: int, *, split: str) -> Picture:
    if not isinstance(entry, dict) or not isinstance(path := entry.get("image"), str):
        broken = f"malformed_record: the entry is {name_of(entry)} without `image`"
        text: Text = ("caption", "human", show(entry), broken)
        return Picture(row=row, id=None, split=split, texts=[text], is_orphan=True)
    caption = entry.get("caption")
    captions = {"caption": caption}
    if isinstance(caption, list):
        captions = {f"caption[{n}]": element for n, element in enumerate(caption)}
    texts: list[Text] = [(name, "human", *text_of(value, "the caption")) for name, value in captions.items()]
    uri = as_url(encode(path))
    return Picture(row=row, id=picture_id(uri), split=split, uri=uri, texts=texts)


def _id(value: Any) -> str | None:
    """Decimal string of a numeric id; another text as it is; None for anything else."""
    if isinstance(value, str) and value:
        return str(int(value)) if value.isascii() and value.isdigit() else as_url(encode(value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _uri(value: Any) -> str | None:
    return as_url(encode(value)) if isinstance(value, str) else None


def _pixels(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None
