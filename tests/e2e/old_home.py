"""A recipe for a HOME, and what identifies its content: run by the code of any revision, and compared with another.

    python tests/e2e/old_home.py make HOME --goodviews OLD/.venv/bin/goodviews   # writes HOME with that code
    python tests/e2e/old_home.py facts HOME                                     # prints its digests as JSON
    python tests/e2e/old_home.py read HOME                                      # reads all of it with this code

`old_home.json` beside this file holds the facts that the code before the move into one folder a verb wrote.
Only what is the same on every machine is a fact: no training and no picture encoder takes part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = [sys.executable, "-m", "infra.cli"]
ROOT = Path(__file__).parents[2]


def make(home: Path, goodviews: Sequence[str] = HERE) -> None:
    """Two data sets, two imported embedding sets, an index, scores and a map."""
    inputs = home.parent / f"{home.name}-inputs"
    inputs.mkdir(parents=True)
    _write_inputs(inputs)
    toyworld = ["--set", "source.scenes=120", "--set", "source.val=0.1", "--set", "source.test=0.2"]
    things = ["--set", "source.text=caption:alt", "--set", "source.id=image", "--set", "scenes_per_shard=16"]
    run(home, goodviews, "ingest", "toyworld", *toyworld, "--scenes-per-shard", "50", "--num-cpus", "0")
    table = ["table", "--input", str(inputs / "things.parquet"), "--dataset", "things"]
    run(home, goodviews, "ingest", *table, *things, "--max-reject-rate", "0.5", "--num-cpus", "0")
    query = "SELECT scene_key FROM scenes WHERE dataset = 'toyworld' AND split = 'train' ORDER BY scene_key"
    keys = [row["scene_key"] for row in json.loads(run(home, goodviews, "catalog", "sql", query, "--json"))]
    for name, seed in (("left", 0), ("right", 1)):
        file = inputs / f"{name}.npz"
        np.savez(file, keys=np.array(keys), vectors=_vectors(len(keys), seed))
        where = ["--name", name, "--dataset", "toyworld", "--split", "train", "--model", name]
        run(home, goodviews, "embed", "import", str(file), *where)
    run(home, goodviews, "index", "build", "left", "--factory", "Flat", "--name", "flat")
    run(home, goodviews, "align", "left", "right", "--k", "5", "--bootstrap", "200", "--permutations", "50")
    run(home, goodviews, "rotate", "left", "right", "--fit-pairs", "40", "--splits", "2", "--bootstrap", "200")


def facts(home: Path) -> dict[str, Any]:
    """Ids of versions, sets and indexes; digests of the files of versions, and of the vectors of sets."""
    versions = {
        path.parent.name: path.name for path in sorted(home.glob("datasets/*/*")) if (path / "job.json").is_file()
    }
    kept = [p for kind in ("parquet", "tar") for p in sorted(home.glob(f"datasets/**/*.{kind}"))]
    kept += sorted(p for p in home.glob("embeddings/**/*") if p.is_file() and p.suffix != ".json")
    scores = {
        f"{row['metric']}/{row['map']}/{row['direction']}/{row['alignment_id']}": round(row["value"], 6)
        for row in _select(home, "SELECT * FROM alignments ORDER BY alignment_id")
    }
    return {
        "versions": versions,
        "embeddings": {r["name"]: r["embedding_id"] for r in _select(home, "SELECT * FROM embeddings ORDER BY name")},
        "indexes": sorted(p.name for p in home.glob("indexes/*") if p.is_dir()),
        "files": {str(p.relative_to(home)): hashlib.sha256(p.read_bytes()).hexdigest() for p in kept},
        "scores": scores,
    }


def read(home: Path, goodviews: Sequence[str] = HERE) -> None:
    """Every command that reads a HOME, on everything in it. Raises CalledProcessError for one that fails."""
    run(home, goodviews, "catalog", "verify")
    for (name,) in [(row["name"],) for row in _select(home, "SELECT name FROM embeddings ORDER BY name")]:
        run(home, goodviews, "knn", name, "--k", "3", "--json")
    if (home / "indexes").is_dir():
        run(home, goodviews, "index", "verify", "flat")
        run(home, goodviews, "align", "left", "right", "--k", "5", "--bootstrap", "200", "--permutations", "50")
    for row in _select(home, "SELECT run_id FROM runs"):
        run(home, goodviews, "runs", "show", row["run_id"])
    run(home, goodviews, "report", "--out", str(home / "report-read"))
    run(home, goodviews, "catalog", "rebuild")
    run(home, goodviews, "catalog", "verify")


def run(home: Path, goodviews: Sequence[str], *words: str) -> str:
    """Standard output of one command on that HOME. Raises RuntimeError, with its messages, for one that fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if list(goodviews) == HERE:
        env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [*goodviews, *words, "--home", str(home)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _write_inputs(folder: Path) -> None:
    texts = [(f"img-{7 * i % 60:02d}", f"A thing {i} seen near &amp; liked by {i % 11} people") for i in range(200)]
    texts += [("img-00", "click here to buy"), ("img-01", ""), ("img-02", "x" * 5000)]
    table = pa.table({"image": [i for i, _ in texts], "caption": [text for _, text in texts]})
    pq.write_table(table, folder / "things.parquet")


def _vectors(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Two views of one latent, of whole numbers so that they are the same on every machine."""
    latent = np.arange(n * 6).reshape(n, 6) * 2654435761 % 97 - 48
    noise = np.arange(n * 8).reshape(n, 8) * (40503 + 2 * seed) % 13 - 6
    spread = np.arange(48).reshape(6, 8) * (31 + seed) % 7 - 3
    return np.asarray(latent @ spread + noise, np.float32)


def _select(home: Path, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run(home, HERE, "catalog", "sql", query, "--json"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("make", "facts", "read"))
    parser.add_argument("home", type=Path)
    parser.add_argument("--goodviews", default=None, help="The command of the revision; default: this checkout's.")
    given = parser.parse_args()
    command = [given.goodviews] if given.goodviews else HERE
    if given.verb == "facts":
        print(json.dumps(facts(given.home), indent=1))
    elif given.verb == "make":
        make(given.home, command)
    else:
        read(given.home, command)
