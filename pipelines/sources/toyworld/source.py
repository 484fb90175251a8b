"""The built-in toy world, which needs no download: scenes drawn from a seed, with captions and small pictures.

It can test the claim of the paper: captions and picture of a scene share its state, which is recorded in
`RECORDS.state`; writer and camera are the nuisance.
Invariant: a scene is a function of (seed, number, options), whatever the piece in which it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import PIL
from numpy.typing import NDArray

from infra.errors import ConfigError, InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.rows import Record, Text, one_batch
from pipelines.sources.toyworld import writers
from pipelines.sources.toyworld.draws import Dice, uniforms, words
from pipelines.sources.toyworld.states import State, draw_states

WORLD: Final = "1"
"""Version of the world. Raise it with every change that changes a caption, a state or a picture."""

BATCH_SCENES: Final = 1_024
MOST_PIECES: Final = 1_000
"""A small world is cut into pieces of one batch, so that all CPUs work; a large one into this many, to limit files."""

LARGEST_PX: Final = 1_024

SPLITS: Final = ("train", "val", "test")

BROKEN_PICTURES: Final = (
    "A small image used to signify a broken web image link",
    "Images are missing images are missing",
    "Broken image",
)
"""Captions of pictures that did not load, as they stand in Flickr30k."""


@dataclass(frozen=True, kw_only=True)
class Toyworld(Source):
    """A world of any number of scenes; the same options give the same bytes."""

    scenes: int = 2_000
    "How many scenes there are."
    captions: int = 5
    "How many captions each scene has; there are 12 writers, so beyond 12 a writer writes again."
    images: bool = True
    "Whether scenes have pictures."
    image_px: int = 64
    "Side of a picture in pixels."
    seed: int = 0
    "Another seed is another world."
    val: float = 0.1
    "Share of scenes in the split val, by hash of the number."
    test: float = 0.1
    "Share of scenes in the split test."
    defects: float = 0.01
    "Share of captions that are broken on purpose: repeats, empty ones, captions of broken pictures."

    name = "toyworld"
    grouped = False
    needs_input = False

    def __post_init__(self) -> None:
        for option, low, high in (("scenes", 1, 10**9), ("captions", 1, 999), ("image_px", 16, LARGEST_PX)):
            if not low <= getattr(self, option) <= high:
                raise ConfigError(f"The option source.{option}={getattr(self, option)} is not in {low:,} to {high:,}.")
        if min(self.val, self.test) < 0 or self.val + self.test > 1 or not 0 <= self.defects <= 1:
            raise ConfigError(
                f"The options source.val={self.val}, source.test={self.test}, source.defects={self.defects} are "
                "shares: none below 0, and val + test at most 1."
            )

    @property
    def writers(self) -> Mapping[str, str]:
        """The version of the world; and of Pillow, when there are pictures."""
        return {"toyworld": WORLD, "pillow": PIL.__version__} if self.images else {"toyworld": WORLD}

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Counts scenes by split; there is nothing to look at. Raises InputError when inputs are named."""
        if inputs:
            raise InputError(f"The toy world reads no files, but {len(inputs)} inputs are named. Leave `--input` out.")
        scenes = self.scenes if limit is None else min(self.scenes, limit)
        pieces = []
        step = BATCH_SCENES * -(-scenes // (BATCH_SCENES * MOST_PIECES))
        for start in range(0, scenes, step):
            stop = min(start + step, scenes)
            places, counts = np.unique(self._splits(np.arange(start, stop)), return_counts=True)
            by_split = {SPLITS[place]: count for place, count in zip(places.tolist(), counts.tolist(), strict=True)}
            pieces.append(Piece(input=None, start=start, stop=stop, scenes_by_split=by_split))
        columns = {f"caption[{n}]": "text:human" for n in range(self.captions)} | {"state": "state"}
        size = f", pictures of {self.image_px} x {self.image_px} px" if self.images else ""
        return Survey(
            format=f"toy world of {self.scenes:,} scenes, seed {self.seed}{size}", pieces=pieces, columns=columns
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Scenes [start, stop)."""
        for start in range(piece.start, piece.stop, BATCH_SCENES):
            yield self._batch(np.arange(start, min(start + BATCH_SCENES, piece.stop), dtype=np.int64))

    def _batch(self, numbers_N: NDArray[np.int64]) -> Batch:
        states = draw_states(self.seed, numbers_N)
        captions = list(zip(*(self._captions(numbers_N, states, slot) for slot in range(self.captions)), strict=True))
        damage = uniforms(self.seed, "toyworld.defect", numbers_N, 2 * self.captions).tolist()
        pictures = self._pictures(numbers_N, states) if self.images else [None] * len(states)
        splits = self._splits(numbers_N).tolist()
        records = []
        for row, number in enumerate(numbers_N.tolist()):
            id_, image = f"toy-{number:07d}", pictures[row]
            columns: dict[str, object] = {"state": states[row].to_json()}
            if image:
                columns |= {
                    "image": image,
                    "image_uri": f"{id_}.jpg",
                    "image_sha256": hashlib.sha256(image).hexdigest(),
                }
                columns |= {"width": self.image_px, "height": self.image_px}
            texts: list[Text] = [
                (f"caption[{slot}]", "human", None if text is None else text.encode(), None)
                for slot, text in enumerate(self._damaged(captions[row], Dice(damage[row])))
            ]
            records.append(Record(source_id=id_, split=SPLITS[splits[row]], row=number, texts=texts, columns=columns))
        return one_batch("toyworld", records)

    def _splits(self, numbers_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) places in SPLITS."""
        # One draw a scene: a larger share of val takes scenes from train only, and never from test.
        draws_N = uniforms(self.seed, "toyworld.split", numbers_N, 1)[:, 0]
        return np.where(draws_N < self.test, 2, np.where(draws_N < self.test + self.val, 1, 0))

    def writers_of(self, numbers_N: NDArray[np.int64], slot: int) -> NDArray[np.int64]:
        """(N,) places in `writers.WRITERS` of the writer of each scene at the slot; 12 slots have 12 writers."""
        # Sorting random draws gives each scene a random order of the writers.
        draws_NW = uniforms(self.seed, "toyworld.writers", numbers_N, len(writers.WRITERS))
        return np.argsort(draws_NW, axis=1, kind="stable")[:, slot % len(writers.WRITERS)]

    def _captions(self, numbers_N: NDArray[np.int64], states: Sequence[State], slot: int) -> list[str]:
        draws = uniforms(self.seed, f"toyworld.caption.{slot}", numbers_N, writers.DRAWS).tolist()
        chosen = self.writers_of(numbers_N, slot).tolist()
        return [
            writers.write(writers.WRITERS[writer], state, Dice(draw))
            for writer, state, draw in zip(chosen, states, draws, strict=True)
        ]

    def _damaged(self, captions: Sequence[str], dice: Dice) -> list[str | None]:
        """The captions, some of them with the defects of real ones."""
        damaged: list[str | None] = []
        for caption in captions:
            is_broken, kind = dice.chance(self.defects), dice.roll()
            before = damaged[-1] if damaged else None
            if not is_broken:
                damaged.append(caption)
            elif kind < 0.5 and before:
                damaged.append(before if kind < 0.25 else before.rstrip(".!").upper() + "!!")
            elif kind < 0.75:
                damaged.append(None if kind < 0.625 else "")
            else:
                # kind is in [.75, 1): rescaled to choose among the captions, without another draw.
                damaged.append(BROKEN_PICTURES[int((kind - 0.75) * 4 * len(BROKEN_PICTURES))])
        return damaged

    def _pictures(self, numbers_N: NDArray[np.int64], states: Sequence[State]) -> list[bytes]:
        # Drawing is imported late, as worlds without pictures do not need it.
        from pipelines.sources.toyworld.camera import DRAWS, picture

        draws = uniforms(self.seed, "toyworld.picture", numbers_N, DRAWS).tolist()
        grains = words(self.seed, "toyworld.grain", numbers_N, 1)[:, 0].tolist()
        return [
            picture(state, Dice(draw), px=self.image_px, grain=grain)
            for state, draw, grain in zip(states, draws, grains, strict=True)
        ]
