"""SIGReg against the plain formula: seconds and memory of one forward and backward pass.

Usage: bench_sigreg.py [--rows N] [--threads T] [--repeats R]. Each contestant runs alone in its own process. Seconds are the
median over the repeats after one warm-up; memory is the peak of resident memory during a pass over what stood before it
(Linux). The plain formula holds all rows x directions x knots, as the public code does.
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

REPOSITORY = Path(__file__).parents[2]
CONTESTANTS = {"ours": "goodviews, tiles of directions", "plain": "plain formula"}


def sigreg_ratios(
    *, rows: int = 2048, dimensions: int = 128, n_directions: int = 1024, threads: int = 2, repeats: int = 5
) -> dict[str, float]:
    """Seconds and bytes of both, and ours / plain: keys seconds_ours, bytes_ours, ..., seconds_ratio, bytes_ratio.

    Raises CalledProcessError when a contestant fails, RuntimeError when the two disagree.
    """
    sizes = [str(n) for n in (rows, dimensions, n_directions, threads, repeats)]
    found: dict[str, float] = {}
    for name in CONTESTANTS:
        command = [sys.executable, str(Path(__file__)), "--contestant", name, *sizes]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
        found |= {f"{key}_{name}": value for key, value in json.loads(output.splitlines()[-1]).items()}
    for key in ("loss", "gradient"):
        if abs(found[f"{key}_ours"] / found[f"{key}_plain"] - 1) > 1e-4:
            raise RuntimeError(
                f"The contestants disagree on the {key}: {found}. A time of a wrong result means nothing."
            )
    return found | {f"{key}_ratio": found[f"{key}_ours"] / found[f"{key}_plain"] for key in ("seconds", "bytes")}


def contest(name: str, rows: int, dimensions: int, n_directions: int, threads: int, repeats: int) -> dict[str, float]:
    """Run one contestant in this process: seconds, bytes, and the loss and the size of the gradient to compare."""
    import torch

    from tests.trainer.sigreg import sigreg_statistics
    from trainer.model.objectives import LejepaConfig, directions

    torch.set_num_threads(threads)
    config = LejepaConfig(weight=1.0, n_directions=n_directions)
    x = torch.randn(rows, dimensions, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def plain() -> torch.Tensor:
        t = torch.linspace(0, config.t_max, config.n_knots)
        weights = torch.full_like(t, 2 * config.t_max / (config.n_knots - 1))
        weights[[0, -1]] /= 2
        phi = torch.exp(-(t**2) / 2)
        angles = (x @ directions(0, dimensions, config, like=x))[:, :, None] * t
        return rows * ((angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2) @ (weights * phi)

    statistic: Callable[[], torch.Tensor] = plain if name == "plain" else lambda: sigreg_statistics(x, 0, config)

    def step() -> tuple[float, float]:
        x.grad = None
        loss = statistic().mean()
        torch.autograd.backward(loss)
        return loss.item(), float(x.grad.norm()) if x.grad is not None else 0.0

    # A first small product starts the thread pool, which is nobody's memory.
    torch.ones(256, 256) @ torch.ones(256, 256)
    peak = _peak_over_now(step)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        loss, gradient = step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "bytes": peak, "loss": loss, "gradient": gradient}


def _peak_over_now(step: Callable[[], object]) -> float:
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    step()
    return 1024.0 * (_status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--contestant"]:
        sys.path.insert(0, str(REPOSITORY))
        print(json.dumps(contest(sys.argv[2], *map(int, sys.argv[3:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found = sigreg_ratios(rows=args.rows, threads=args.threads, repeats=args.repeats)
    print(
        f"SIGReg, {args.rows} rows x 128, 1,024 directions, 17 knots, {args.threads} threads, median of {args.repeats}"
    )
    for name, label in CONTESTANTS.items():
        print(f"  {label:32} {found[f'seconds_{name}']:8.3f} s {found[f'bytes_{name}'] / 1e6:8.1f} MB")
    print(f"  {'ours / plain':32} {found['seconds_ratio']:8.3f}   {found['bytes_ratio']:8.3f}")


if __name__ == "__main__":
    main()
