"""Exact nearest neighbours beside the bare FAISS search, beside a full similarity matrix, and their memory.

Usage: bench_knn.py [speed] [matrix] [memory] [big] [--rows N] [--repeats R] [--threads T]; all four when none is named.

speed   10 neighbours of 50,000 x 384 against `IndexFlatIP.search` over unit rows, both in one process, in alternation:
        ours converts, rescores, orders ties and reports them; medians and their ratio
matrix  20,000 x 384 against the similarity matrix and its argsort, as the public alignment code does it: seconds and the
        peak of resident memory, each contestant alone in a process
memory  peak of resident memory over the input from 25,000 to 200,000 rows
big     100 queries against a base of over 2^31 elements, no row of which is zero: a sliding window over a flat buffer
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

import numpy as np

DIMS = 384
K = 10
CURVE = (25_000, 50_000, 100_000, 200_000)
PARTS = ("speed", "matrix", "memory", "big")


def speed_ratios(*, rows: int = 50_000, repeats: int = 3, threads: int = 2) -> dict[str, float]:
    """Median seconds of both in alternation, and ours / bare. Raises RuntimeError when their neighbours disagree."""
    import faiss

    from indexing.search.knn import exact_knn

    faiss.omp_set_num_threads(threads)
    x = _noise(rows)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)

    def bare() -> np.ndarray:
        index = faiss.IndexFlatIP(DIMS)
        index.add(unit)
        found: np.ndarray = index.search(unit, K + 1)[1]
        return found[:, 1:]

    contestants: dict[str, Callable[[], np.ndarray]] = {"ours": lambda: exact_knn(x, k=K).ids_MK, "bare": bare}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        answers = {}
        for name, search in contestants.items():
            start = time.perf_counter()
            answers[name] = search()
            seconds[name].append(time.perf_counter() - start)
        # Of random rows, only neighbours whose cosines differ in the last bits may change places.
        if (answers["ours"] != answers["bare"]).mean() > 1e-3:
            raise RuntimeError("The contestants disagree. A time of a wrong result means nothing.")
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["bare"], strict=True)]
    return {
        **medians,
        "ratio": statistics.median(ratios),
        "gflops_ours": 2e-9 * rows * rows * DIMS / medians["ours"],
        "gflops_bare": 2e-9 * rows * rows * DIMS / medians["bare"],
    }


def matrix_ratios(*, rows: int = 20_000, repeats: int = 3, threads: int = 2) -> dict[str, float]:
    """Seconds and bytes of ours and of the whole matrix, each in its own process; and how many times ours is less."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "matrix": []}
    for _ in range(repeats):
        for name, taken in found.items():
            taken.append(_alone(name, rows, threads))
    # Neighbours at the last place whose cosines are equal in float32 may differ; one in a million moves the mean by less.
    if any(abs(one["mean"] / found["ours"][0]["mean"] - 1) > 1e-4 for taken in found.values() for one in taken):
        raise RuntimeError("The contestants disagree. A time of a wrong result means nothing.")
    medians = {
        f"{k}_{name}": statistics.median(one[k] for one in taken) for name, taken in found.items() for k in taken[0]
    }
    return medians | {k: medians[f"{k}_matrix"] / medians[f"{k}_ours"] for k in ("seconds", "bytes")}


def memory_curve(*, threads: int = 2, sizes: tuple[int, ...] = CURVE) -> dict[int, dict[str, float]]:
    """rows -> seconds and bytes over the input of ours, each size alone in a process."""
    return {rows: _alone("ours", rows, threads) for rows in sizes}


def _alone(name: str, rows: int, threads: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__)), "--contestant", name, str(rows), str(threads)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def contest(name: str, rows: int, threads: int) -> dict[str, float]:
    """One contestant in this process: seconds, peak of resident memory over what stood before, mean of the row numbers found."""
    import faiss

    faiss.omp_set_num_threads(threads)
    x = _noise(rows)
    search = {"ours": _ours, "matrix": _matrix}[name]
    search(x[:500], threads)  # imports and thread pools are nobody's memory
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    ids = search(x, threads)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": 1024.0 * (_status("VmHWM") - before), "mean": float(ids.mean())}


def _ours(x: np.ndarray, threads: int) -> np.ndarray:
    from indexing.search.knn import exact_knn

    return exact_knn(x, k=K).ids_MK


def _matrix(x: np.ndarray, threads: int) -> np.ndarray:
    import torch

    torch.set_num_threads(threads)
    unit = torch.nn.functional.normalize(torch.from_numpy(x), dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(-1e8)
    return similarity.argsort(dim=1, descending=True)[:, :K].numpy()


def big(*, threads: int = 2) -> dict[str, float]:
    """100 queries against 2^31 + 2^23 float16 elements, none of whose rows is zero; memory of this process, no file's."""
    import faiss

    from indexing.search.knn import exact_knn

    faiss.omp_set_num_threads(threads)
    dims, rows = 64, (2**31 + 2**23) // 64
    flat = np.random.default_rng(0).standard_normal(rows + dims - 1, dtype=np.float32).astype(np.float16)
    base = np.lib.stride_tricks.sliding_window_view(flat, dims)
    asked = np.linspace(0, rows - 1, 100).astype(np.int64)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    found = exact_knn(base, k=K, queries_MD=base[asked])
    seconds = time.perf_counter() - start
    if found.ids_MK[:, 0].tolist() != asked.tolist() or not (found.scores_MK[:, 0] == 1).all():
        raise RuntimeError("A query did not find itself first.")
    return {"elements": base.size, "seconds": seconds, "bytes": 1024.0 * (_status("VmHWM") - before)}


def _noise(rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, DIMS), dtype=np.float32)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main() -> None:
    """Print the tables."""
    if sys.argv[1:2] == ["--contestant"]:
        print(json.dumps(contest(sys.argv[2], *map(int, sys.argv[3:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--matrix-rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for part in args.parts or PARTS:
        _print(part, args)


def _print(part: str, args: Any) -> None:
    if part == "speed":
        found = speed_ratios(rows=args.rows, repeats=args.repeats, threads=args.threads)
        print(f"{K} neighbours of {args.rows:,} x {DIMS}, {args.threads} threads, median of {args.repeats}")
        for name, label in (("ours", "goodviews knn, exact"), ("bare", "IndexFlatIP.search")):
            print(f"  {label:34} {found[name]:8.2f} s {found[f'gflops_{name}']:8.0f} GFLOP/s")
        print(f"  {'ours / bare':34} {found['ratio']:8.3f}")
    elif part == "matrix":
        found = matrix_ratios(rows=args.matrix_rows, repeats=args.repeats, threads=args.threads)
        print(f"{K} neighbours of {args.matrix_rows:,} x {DIMS}, each alone, median of {args.repeats}")
        for name, label in (("ours", "goodviews knn, exact"), ("matrix", "whole matrix and argsort")):
            print(f"  {label:34} {found[f'seconds_{name}']:8.2f} s {found[f'bytes_{name}'] / 1e6:8.0f} MB")
        print(f"  {'matrix / ours':34} {found['seconds']:8.1f}   {found['bytes']:8.1f}")
    elif part == "memory":
        print(f"Memory over the input, {K} neighbours of rows x {DIMS}")
        for rows, one in memory_curve(threads=args.threads).items():
            answer = rows * K * 12 / 1e6
            print(f"  {rows:10,} rows {one['seconds']:8.1f} s {one['bytes'] / 1e6:8.0f} MB (answer {answer:.0f} MB)")
    else:
        one = big(threads=args.threads)
        print(
            f"100 queries, base of {one['elements']:,.0f} elements: {one['seconds']:.1f} s, {one['bytes'] / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
