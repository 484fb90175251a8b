"""The effect on real captions: good views against bad views and next tokens, scored against frozen image features.

Usage:
  captions_effect.py prepare --data REAL_DATA --home HOME          multi30k without the scored photos; the photos; their features
  captions_effect.py train --home HOME ARM SEED LR                 one arm of `tiny-cpu`, as run ARM-sSEED-lrLR
  captions_effect.py score --home HOME RUN[@MOMENT]...             embed, align and rotate, all recorded in the catalog of HOME
  captions_effect.py choose --home HOME                            learning rate of each arm by the score on the fit photos
  captions_effect.py table --home HOME                             mean and spread over seeds, by arm and moment

Everything goes through the commands of goodviews; this file only names their arguments and divides the photos.
Text: captions of the 937 photos that Flickr8k and Flickr30k share. Images: EfficientNet-Lite0 features of the same photos.
The photos are divided once, by a seed: 500 to choose learning rates on, 437 that no choice has seen. Rotations are fitted
on 500 photos and scored on the other 437, over 20 divisions.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "val", "test_2016")
N_FIT = 500
FEATURES = "effnet"
ARMS = ("good", "bad", "next-token")
RUN = re.compile(r"(?P<arm>[a-z-]+)-s(?P<seed>\d+)-lr(?P<lr>[^@]+)(@(?P<moment>.+))?")
COLUMNS = {
    "mutual, mean of 5": ("mutual_knn", 437, "mean of the unit captions"),
    "mutual, one caption": ("mutual_knn", 437, "one caption a scene"),
    "mutual, 937 photos": ("mutual_knn", 937, "mean of the unit captions"),
    "R@1, 20 divisions": ("recall@1", 437, "mean of the unit captions"),
}
"Heading: metric, scenes scored, and what the row's selection says of the captions."


def main() -> None:
    """Dispatch to the verbs above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, function in {
        "prepare": prepare,
        "train": train,
        "score": score,
        "choose": choose,
        "table": table,
    }.items():
        verb = verbs.add_parser(name)
        verb.add_argument("--home", type=Path, required=True)
        verb.set_defaults(run=function)
        if name == "prepare":
            verb.add_argument("--data", type=Path, required=True)
        elif name == "train":
            verb.add_argument("arm", choices=ARMS)
            verb.add_argument("seed")
            verb.add_argument("lr")
        elif name == "score":
            verb.add_argument("runs", nargs="+")
    arguments = parser.parse_args()
    arguments.run(arguments)


def goodviews(home: Path, *words: str) -> str:
    """Run one command, show it, and return its standard output."""
    print("$ goodviews", *words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "infra.cli", *words, "--home", str(home)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ask(home: Path, query: str) -> list[dict[str, Any]]:
    """Rows of a query."""
    found: list[dict[str, Any]] = json.loads(goodviews(home, "catalog", "sql", query, "--json"))
    return found


# --- data ---------------------------------------------------------------------------------------------------------


def photo_ids(data: Path) -> list[str]:
    """Flickr id of each of the 1,000 photos, in the order of the features."""
    with np.load(data / "features" / "flickr8k_1000_features.npz", allow_pickle=False) as features:  # noqa: TID251
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


def prepare(arguments: argparse.Namespace) -> None:
    """Ingest multi30k without the scored photos, the photos as `photos`, and import their features."""
    data, home = arguments.data, arguments.home
    scenes, ids = multi30k(data), photo_ids(data)
    captions = {i: texts for split in scenes.values() for i, texts in split.items()}
    kept = [i for i in ids if i in captions]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_multi30k(folder / "train", scenes, set(kept))
        goodviews(home, "ingest", "multi30k", "--input", str(folder / "train"), "--num-cpus", "0")
        with (folder / "photos.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["id", "caption"])
            rows.writerows((i, text) for i in kept for text in captions[i])
        columns = ("source.text=caption:human", "source.id=id", "source.split=photos")
        words = [word for text in columns for word in ("--set", text)]
        source = ("--dataset", "photos", "--input", str(folder / "photos.csv"), "--num-cpus", "0")
        goodviews(home, "ingest", "table", *source, *words)
        with np.load(data / "features" / "flickr8k_1000_features.npz", allow_pickle=False) as features:  # noqa: TID251
            vectors = features["effnet_lite0"][[row for row, i in enumerate(ids) if i in captions]]
        np.savez(folder / "features.npz", keys=np.array(kept), vectors=vectors)
        where = ("--dataset", "photos", "--split", "photos", "--of", "images")
        goodviews(home, "embed", "import", str(folder / "features.npz"), "--name", FEATURES, *where)
    order = np.random.default_rng(0).permutation(len(kept))
    for part, rows_ in {"choosing": order[:N_FIT], "scored": order[N_FIT:]}.items():
        (home / f"{part}.txt").write_text("".join(f"{kept[i]}\n" for i in rows_))


def _write_multi30k(folder: Path, scenes: dict[str, dict[str, list[str]]], left_out: set[str]) -> None:
    folder.mkdir()
    for split, captions in scenes.items():
        kept = {i: texts for i, texts in captions.items() if i not in left_out}
        print(f"{split}: {len(kept):,} scenes of {len(captions):,}", file=sys.stderr)
        (folder / f"{split}_images.txt").write_text("".join(f"{i}.jpg\n" for i in kept))
        for k in range(5):
            (folder / f"{split}.{k + 1}.en").write_text("".join(texts[k] + "\n" for texts in kept.values()))


# --- runs and scores ----------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """One run, on one thread of this process."""
    arm, seed, lr = arguments.arm, arguments.seed, arguments.lr
    run = ("--recipe", "tiny-cpu", "--arm", arm, "--seed", seed, "--run-id", f"{arm}-s{seed}-lr{lr}")
    goodviews(arguments.home, "train", *run, "--set", f"optimizer.lr={lr}")


def score(arguments: argparse.Namespace) -> None:
    """Embed the captions of the photos with each encoder, then align and rotate against the image features."""
    home = arguments.home
    for run in arguments.runs:
        words = ("--dataset", "photos", "--split", "photos", "--of", "captions", "--num-cpus", "0", "--name", run)
        goodviews(home, "embed", "--model", f"run:{run}", *words)
        for part in ("choosing", "scored"):
            goodviews(home, "align", run, FEATURES, "--keys", str(home / f"{part}.txt"))
        goodviews(home, "align", run, FEATURES, "--keys", str(home / "scored.txt"), "--captions", "hash")
        goodviews(home, "align", run, FEATURES)
        goodviews(home, "rotate", FEATURES, run, "--fit-pairs", str(N_FIT), "--splits", "20")

        if "@" not in run:
            rival = run.replace("good", "bad", 1)
            if run.startswith("good-") and (home / "runs" / rival).exists():
                goodviews(home, "align", run, FEATURES, "--against", rival, "--keys", str(home / "scored.txt"))


def choose(arguments: argparse.Namespace) -> None:
    """The learning rate of each arm whose seed 0 has the highest mutual k-NN on the photos for choosing."""
    query = f"SELECT left_name, value FROM alignments WHERE metric = 'mutual_knn' AND n = {N_FIT}"
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in ask(arguments.home, query):
        run = RUN.fullmatch(row["left_name"])
        if run and run["seed"] == "0" and run["moment"] is None:
            found[run["arm"]][run["lr"]] = row["value"]
    print(json.dumps({arm: {"chosen": max(tried, key=tried.__getitem__), **tried} for arm, tried in found.items()}))


def table(arguments: argparse.Namespace) -> None:
    """Mean and standard deviation over seeds, for each arm, learning rate and moment."""
    query = "SELECT left_name, right_name, metric, map, direction, n, selection, value FROM alignments"
    groups: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in ask(arguments.home, query):
        names = (row["left_name"], row["right_name"])
        run = next((match for name in names if (match := RUN.fullmatch(name))), None)
        heading = _heading(row)
        if run is not None and heading is not None and FEATURES in names:
            groups[run["arm"], run["lr"], run["moment"] or "last"][heading].append(row["value"])
    print("| arm | lr | encoder | " + " | ".join(COLUMNS) + " |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for place, columns in sorted(groups.items()):
        print("| " + " | ".join([*place, *(_cell(columns[heading]) for heading in COLUMNS)]) + " |")


def _heading(row: dict[str, Any]) -> str | None:
    if row["map"] not in ("none", "rotation") or row["direction"] not in (None, "left_to_right"):
        return None
    for heading, (metric, n, captions) in COLUMNS.items():
        if (
            (row["metric"], row["n"]) == (metric, n)
            and captions in row["selection"]
            and "multi" not in row["selection"]
        ):
            return heading
    return None


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" +-{statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread} ({len(values)})"


if __name__ == "__main__":
    main()
