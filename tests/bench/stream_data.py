"""Published versions for the benchmark of the stream: seeded sentences, three texts a scene, through the real shard writer.

`short`: three captions of 8 to 14 words, as in Flickr30k. `long`: an alt text and two of 40 to 75 words, as in Recap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from catalog import schema
from catalog.manifest import JobRecord, Manifest
from infra import storage
from infra.home import Home
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.shards import ShardTask, ViewConfig, publish_shard
from pipelines.ingest.tables import Origin
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.rows import Record, one_batch

ROLES = ("alt", "recap", "recap_conditioned")
WIDTHS = {"short": ((8, 15), (8, 15), (8, 15)), "long": ((4, 20), (40, 75), (40, 75))}
SCENES_PER_SHARD = 10_000
LETTERS = "etaoinshrdlucmfwypvbgk"
"In the order of their frequency in English."


def vocabulary(size: int = 6_000, seed: int = 0) -> list[str]:
    """Distinct made-up words; word r is drawn with probability proportional to 1 / (r + 3), as in real text (Zipf)."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(2, 2 + len(LETTERS))
    words: dict[str, None] = {}
    while len(words) < size:
        length = int(rng.integers(2, 9))
        words["".join(rng.choice(list(LETTERS), length, p=weights / weights.sum()))] = None
    return list(words)


@dataclass(frozen=True, kw_only=True)
class Sentences(Source):
    """A source of `texts` sentences; row i depends on i alone only through its block of 1,000."""

    texts: str = "short"

    name = "sentences"
    bad_passes = 3
    grouped = False
    needs_input = False
    repairs_byte_escapes = False
    writers: Mapping[str, str] = None  # type: ignore[assignment]

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Not used: shards are cut by hand."""
        raise NotImplementedError

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Scenes [start, stop)."""
        words = np.array(vocabulary())
        weights = 1.0 / np.arange(3, 3 + len(words))
        for start in range(piece.start, piece.stop, 1_000):
            rng = np.random.default_rng([1, start])
            count = min(1_000, piece.stop - start)
            draws = [_sentences(rng, words, weights, count, *WIDTHS[self.texts][j]) for j in range(len(ROLES))]
            records = (
                Record(
                    source_id=f"scene-{start + i:09d}",
                    split="train",
                    row=start + i,
                    texts=[(role, role, texts[i].encode(), None) for role, texts in zip(ROLES, draws, strict=True)],
                )
                for i in range(count)
            )
            yield one_batch("sentences", records)


def _sentences(
    rng: np.random.Generator, words: np.ndarray, weights: np.ndarray, count: int, low: int, high: int
) -> list[str]:
    lengths = rng.integers(low, high, count)
    drawn = words[rng.choice(len(words), int(lengths.sum()), p=weights / weights.sum())].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(drawn[end - n : end]).capitalize() + "." for n, end in zip(lengths.tolist(), ends, strict=True)]


def publish(home: Home, texts: str, count: int) -> str:
    """Publish `count` scenes as dataset `texts`, version `bench`; returns the folder of the version."""
    folder = home.datasets(texts, "bench")
    names = []
    for shard, start in enumerate(range(0, count, SCENES_PER_SHARD)):
        stop = min(count, start + SCENES_PER_SHARD)
        piece = Piece(input=None, start=start, stop=stop, scenes_by_split={"train": stop - start})
        task = ShardTask(
            origin=Origin(dataset=texts, version="bench", split="train", shard=shard),
            version_url=folder,
            source=Sentences(texts=texts),
            clean=CleanConfig(),
            views=ViewConfig(good=True, bad=True, images=False, bad_passes=3, seed=0),
            pieces=(piece,),
        )
        names.append(publish_shard(task).name)
    urls = [storage.join(folder, f"manifests/{name}.json") for name in names]
    manifests = [Manifest.from_json(storage.read_bytes(url), url=url) for url in urls]
    total = {
        name: sum(getattr(m, name) for m in manifests) for name in ("scenes", "captions", "texts_read", "texts_kept")
    }
    content = {"bad_passes": 3, "seed": 0}
    job = JobRecord(dataset=texts, version="bench", content=content, inputs=[], shards=names, rejects={}, **total)
    storage.publish(storage.join(folder, schema.JOB_PATH), job.to_json())
    return folder
