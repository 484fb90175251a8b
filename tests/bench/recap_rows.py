"""Recap-shaped parquet for the benchmark: two texts a row, the widths and quirks of formats as published, seeded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = [
    "a",
    "the",
    "of",
    "with",
    "dog",
    "house",
    "blue",
    "large",
    "small",
    "image",
    "features",
    "woman",
    "standing",
    "street",
    "red",
    "and",
    "in",
    "on",
    "background",
    "detailed",
    "wooden",
    "table",
    "left",
    "right",
    "white",
    "shirt",
    "car",
    "tree",
    "photo",
    "sale",
    "man",
    "holding",
    "bowl",
    "near",
    "sky",
    "building",
    "green",
    "light",
    "sign",
]
ROWS_PER_GROUP = 50_000


def write_rows(folder: Path, rows: int, *, files: int, seed: int = 0) -> int:
    """Write `rows` rows in `files` files; returns the bytes of all texts. One row in 211 repeats its neighbour's image."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for f in range(files):
        rng = np.random.default_rng([seed, f])
        n = rows // files
        alt, recap = _texts(rng, n, 4, 20), _texts(rng, n, 40, 75)
        for i in range(0, n, 97):
            alt[i] += " \\xc2\\xae"
        for i in range(5, n, 17):
            alt[i] += " caf\u00e9"
        for i in range(7, n, 61):
            alt[i] = "Tom &amp; " + alt[i]
        sha = [hashlib.sha256(f"{seed}-{f}-{i}".encode()).hexdigest() for i in range(n)]
        for i in range(100, n, 211):
            sha[i] = sha[i - 1]
        total += sum(map(len, alt)) + sum(map(len, recap))
        table = pa.table(
            {
                "url": [f"https://cdn{i % 97}.example.com/images/products/{f}/{i:09d}-large.jpg" for i in range(n)],
                "re_caption": recap,
                "org_caption": alt,
                "sha256": sha,
                "key": [f"{i:09d}" for i in range(n)],
                "re_clip_score": rng.random(n),
                "org_clip_score": rng.random(n),
                "re_length": np.array([len(t) for t in recap]),
                "org_length": np.array([len(t) for t in alt]),
            }
        )
        path = folder / f"train-{f:05d}-of-{files:05d}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary, row_group_size=ROWS_PER_GROUP)
        os.rename(temporary, path)
    return total


def _texts(rng: np.random.Generator, n: int, low: int, high: int) -> list[str]:
    lengths = rng.integers(low, high, n)
    words = np.array(WORDS)[rng.integers(0, len(WORDS), lengths.sum())].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(words[end - k : end]) for k, end in zip(lengths.tolist(), ends, strict=True)]
