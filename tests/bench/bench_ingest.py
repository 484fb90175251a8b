"""`make bench`: each claim of speed beside its peer, in one run, as a ratio.

Usage: bench_ingest.py [--rows N] [--peer-rows N] [--rss-rows N] [--repeats R]. Every contestant runs alone in its own process tree;
seconds leave out the start of Ray and the imports; memory is the largest sum of RSS over the tree, sampled five times a
second (shared pages count once a process). Data is generated into a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.bench.recap_rows import write_rows

CPUS = 2


def main() -> None:
    """Run all contestants and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--peer-rows", type=int, default=100_000, help="rows for the slow peers; their rates are flat")
    parser.add_argument("--rss-rows", type=int, default=1_000_000, help="second size for our memory; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ours and of the scans; peers run once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="goodviews-bench-") as name:
        folder = Path(name)
        sizes = {args.rows, args.peer_rows, 100_000 if args.rss_rows else 0, args.rss_rows} - {0}
        for rows in sorted(sizes):
            write_rows(folder / f"rows-{rows}", rows, files=max(2, rows // 50_000))
        ingest_table(folder, args)
        if args.rss_rows:
            memory_table(folder, args)


def ingest_table(folder: Path, args: argparse.Namespace) -> None:
    """Scenes/s and peak RSS of ours against the peers."""
    plan = [
        ("ours", "goodviews ingest, 2 CPUs", args.rows, args.repeats),
        ("plain_loop", "(a) pyarrow + stock TarWriter, one process", args.peer_rows, 1),
        ("ray_data", "(b) Ray Data, 2 CPUs", args.peer_rows, 1),
        ("scan_objects", "(c) bare scan, Python objects", args.rows, args.repeats),
        ("scan_columns", "(c) bare scan, Arrow columns", args.rows, args.repeats),
    ]
    results = {name: [contest(name, folder, rows) for _ in range(n)] for name, _, rows, n in plan}
    best = statistics.median(rate(r) for r in results["ours"])
    table = Table(
        title=f"Ingestion of Recap-shaped rows, two texts each ({args.rows:,} rows; peers {args.peer_rows:,})"
    )
    for heading in ("contestant", "scenes/s (median)", "min to max", "ours is", "peak RSS, tree"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, label, _, _ in plan:
        rates = sorted(rate(r) for r in results[name])
        memory = max(r["tree_rss"] for r in results[name]) / 2**20
        middle = statistics.median(rates)
        table.add_row(
            label,
            f"{middle:,.0f}",
            f"{rates[0]:,.0f} to {rates[-1]:,.0f}",
            f"{best / middle:.2f} x",
            f"{memory:,.0f} MiB",
        )
    Console(width=120).print(table)


def memory_table(folder: Path, args: argparse.Namespace) -> None:
    """Our peak RSS at two sizes: it must not grow with the data."""
    table = Table(title="Memory of goodviews ingest by size")
    for heading in ("rows", "scenes/s", "peak RSS of one worker", "peak RSS, tree"):
        table.add_column(heading, justify="right")
    peaks = []
    for rows in (100_000, args.rss_rows):
        result = contest("ours", folder, rows)
        peaks.append(result["worker_rss"])
        one, tree = result["worker_rss"] / 2**20, result["tree_rss"] / 2**20
        table.add_row(f"{rows:,}", f"{rate(result):,.0f}", f"{one:,.0f} MiB", f"{tree:,.0f} MiB")
    Console(width=120).print(table)
    print(f"growth of a worker's peak RSS: {peaks[1] / peaks[0] - 1:+.1%}")


def rate(result: dict[str, Any]) -> float:
    """Scenes per second."""
    return float(result["scenes"]) / float(result["seconds"])


def contest(name: str, folder: Path, rows: int) -> dict[str, Any]:
    """Run one contestant in its own process and watch its tree."""
    out = folder / f"out-{name}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [sys.executable, str(HERE / "ingest_peers.py"), name, str(folder / f"rows-{rows}"), str(out), str(CPUS)]
    print(f"running {name} on {rows:,} rows", file=sys.stderr, flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak: list[int] = [0]
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peak, stop))
    watcher.start()
    output, errors = process.communicate()
    stop.set()
    watcher.join()
    shutil.rmtree(out, ignore_errors=True)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        raise SystemExit(f"{name} failed with exit code {process.returncode}:\n{errors[-2000:]}")
    return {**json.loads(lines[0].removeprefix("RESULT ")), "tree_rss": peak[0]}


def _watch(pid: int, peak: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.2):
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        total = 0
        for process in tree:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak[0] = max(peak[0], total)


if __name__ == "__main__":
    main()
