"""The effect on real captions: good views against bad views and next tokens, scored against frozen image features.

Usage:
  captions_effect.py prepare --data REAL_DATA --home HOME     multi30k without the scored photos, ingested
  captions_effect.py score --data REAL_DATA ENCODER...        a JSON line for each encoder folder (`name=folder` names it)
  captions_effect.py table LINES.jsonl                        mean and spread over seeds, by arm and moment

Text: captions of the 937 photos that Flickr8k and Flickr30k share. Images: EfficientNet-Lite0 features of the same photos.
The photos are divided once, by hash: 500 to fit rotations and to choose learning rates on, 437 to be scored. Until the
indexing stage exists, the metrics stand here, plainly; formulas as in Huh et al. 2024 (mutual k-NN, arXiv 2405.07987) and
orthogonal Procrustes (Schoenemann 1966).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SPLITS = ("train", "val", "test_2016")
N_FIT = 500
N_RANDOM_SPLITS = 20
K = 10


def main() -> None:
    """Dispatch to prepare, score or table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("--home", type=Path, required=True)
    verb.set_defaults(run=lambda a: prepare(a.data, a.home))
    verb = verbs.add_parser("score")
    verb.add_argument("--data", type=Path, required=True)
    verb.add_argument("encoders", nargs="+")
    verb.set_defaults(run=lambda a: score_all(a.data, a.encoders))
    verb = verbs.add_parser("table")
    verb.add_argument("lines", type=Path)
    verb.set_defaults(run=lambda a: print_table(a.lines))
    arguments = parser.parse_args()
    arguments.run(arguments)


# --- data ---------------------------------------------------------------------------------------------------------


def photo_ids(data: Path) -> list[str]:
    """Flickr id of each of the 1,000 photos, in the order of the features."""
    with np.load(data / "features" / "flickr8k_1000_features.npz") as features:  # noqa: TID251  pickles stay refused
        return [str(name).split("_")[0] for name in features["files"]]


def multi30k(data: Path) -> dict[str, dict[str, list[str]]]:
    """Captions of each image id, by split."""
    found: dict[str, dict[str, list[str]]] = {}
    for split in SPLITS:
        names = (data / "multi30k" / f"{split}_images.txt").read_text().split()
        columns = [
            gzip.decompress((data / "multi30k" / f"{split}.{k}.en.gz").read_bytes()).decode().splitlines()
            for k in range(1, 6)
        ]
        found[split] = {n.removesuffix(".jpg"): list(c) for n, c in zip(names, zip(*columns, strict=True), strict=True)}
    return found


def prepare(data: Path, home: Path) -> None:
    """Write multi30k without the scored photos into a temporary folder and ingest it as `multi30k`."""
    scored = set(photo_ids(data))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, scenes in multi30k(data).items():
            kept = {i: captions for i, captions in scenes.items() if i not in scored}
            print(f"{split}: {len(kept):,} scenes of {len(scenes):,}", file=sys.stderr)
            (folder / f"{split}_images.txt").write_text("".join(f"{i}.jpg\n" for i in kept))
            for k in range(5):
                text = "".join(captions[k] + "\n" for captions in kept.values())
                (folder / f"{split}.{k + 1}.en").write_text(text)
        command = [sys.executable, "-m", "infra.cli", "ingest", "multi30k", "--input", str(folder), "--home", str(home)]
        subprocess.run([*command, "--num-cpus", "0"], check=True)


def scored_set(data: Path) -> tuple[Floats, list[list[str]]]:
    """Image features (937, 1280) and the five captions of the same photos."""
    captions = {i: c for scenes in multi30k(data).values() for i, c in scenes.items()}
    ids = photo_ids(data)
    rows = [row for row, i in enumerate(ids) if i in captions]
    with np.load(data / "features" / "flickr8k_1000_features.npz") as features:  # noqa: TID251  pickles stay refused
        images = features["effnet_lite0"][rows].astype(np.float64)
    return images, [captions[ids[row]] for row in rows]


# --- metrics ------------------------------------------------------------------------------------------------------


def unit(x_ND: Floats) -> Floats:
    """Rows of length 1."""
    return np.asarray(x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12), np.float64)


def mutual_knn(x_ND: Floats, y_NE: Floats, k: int = K) -> float:
    """Mean share of the k nearest neighbours by cosine, self left out; chance is k / (N - 1)."""
    sets = []
    for table in (x_ND, y_NE):
        similarity = unit(table) @ unit(table).T
        np.fill_diagonal(similarity, -np.inf)
        sets.append(np.argsort(-similarity, axis=1, kind="stable")[:, :k])
    both = [len(np.intersect1d(a, b)) for a, b in zip(*sets, strict=True)]
    return float(np.mean(both) / k)


def rotation_recall(x_ND: Floats, y_NE: Floats, fit: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """R@1 of x -> y among the test rows after a rotation fitted on the fit rows; a tie counts against the model."""
    x, y = (unit(table - table[fit].mean(0)) for table in (x_ND, y_NE))
    u, _, vt = np.linalg.svd(x[fit].T @ y[fit], full_matrices=False)
    scores = unit(x[test] @ (u @ vt)) @ y[test].T
    ranks = (scores >= np.diag(scores)[:, None]).sum(1) - 1
    return float((ranks < 1).mean())


def score(images: Floats, captions: Floats) -> dict[str, float]:
    """All numbers of one encoder. captions: (937, 5, D) vectors of single captions."""
    n = len(images)
    order = np.random.default_rng(0).permutation(n)
    fit, test = order[:N_FIT], order[N_FIT:]
    mean, one = (
        unit(captions.reshape(-1, captions.shape[2])).reshape(captions.shape).mean(1),
        captions[np.arange(n), np.arange(n) % 5],
    )
    splits = [np.random.default_rng(1 + s).permutation(n) for s in range(N_RANDOM_SPLITS)]
    random = [rotation_recall(images, mean, s[:N_FIT], s[N_FIT:]) for s in splits]
    return {
        "fit_mutual_mean5": mutual_knn(images[fit], mean[fit]),
        "mutual_mean5": mutual_knn(images[test], mean[test]),
        "mutual_one": mutual_knn(images[test], one[test]),
        "r1_mean5": rotation_recall(images, mean, fit, test),
        "r1_one": rotation_recall(images, one, fit, test),
        "all_mutual_mean5": mutual_knn(images, mean),
        "all_mutual_one": mutual_knn(images, one),
        "r1_20_splits": float(np.mean(random)),
        "r1_shuffled": rotation_recall(images, mean[np.random.default_rng(9).permutation(n)], fit, test),
    }


# --- encoders -----------------------------------------------------------------------------------------------------


def embed(folder: str, texts: list[str]) -> Floats:
    """Mean-pooled vectors (len(texts), D) of an exported encoder folder, as its users would load it."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    order = np.argsort([len(t) for t in texts], kind="stable")
    out: list[NDArray[Any]] = []
    with torch.inference_mode():
        for start in range(0, len(texts), 256):
            batch = [texts[i] for i in order[start : start + 256]]
            encoded = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            hidden = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).last_hidden_state
            mask = encoded["attention_mask"][:, :, None]
            out.append(((hidden * mask).sum(1) / mask.sum(1)).double().numpy())
    vectors = np.concatenate(out)
    back = np.empty_like(vectors)
    back[order] = vectors
    return back


def score_all(data: Path, encoders: list[str]) -> None:
    """Print a JSON line for each encoder."""
    images, captions = scored_set(data)
    texts = [c for scene in captions for c in scene]
    for word in encoders:
        name, _, folder = word.rpartition("=")
        vectors = embed(folder, texts).reshape(len(captions), 5, -1)
        print(json.dumps({"name": name or folder, "n": len(images), **score(images, vectors)}), flush=True)


def print_table(path: Path) -> None:
    """Mean and range over seeds of names of the form ARM/MOMENT/seed-N."""
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        groups[record.pop("name").rpartition("/")[0]].append(record)
    columns = ["mutual_mean5", "mutual_one", "r1_mean5", "r1_one", "r1_20_splits", "r1_shuffled"]
    print("| arm / moment | seeds | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for name, records in sorted(groups.items()):
        cells = []
        for column in columns:
            values = [r[column] for r in records]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.4f} +-{spread:.4f}")
        print(f"| {name} | {len(records)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
