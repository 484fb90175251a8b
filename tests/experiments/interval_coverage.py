"""How often the bootstrap intervals hold what they should: the expected value of the score for that number of items.

Usage: interval_coverage.py [--items 200] [--worlds 400] [--draws 1000]

Every world draws new items of one population (a latent of 8 dims seen by two noisy encoders), scores them and makes its
interval; neighbours, gallery and layers stay as they are within a world. The target is the mean score over all worlds. A share
of .95 is right; with 400 worlds its standard error is .011. The rotation behind R@1 is fitted once, on items of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from indexing.align.score import METRICS, AlignConfig
from indexing.rotate.retrieval import rank
from indexing.rotate.rotation import FittedMap, MapConfig, fit
from indexing.uncertainty.bootstrap import BootstrapConfig, mean_interval
from indexing.uncertainty.calibration import CalibrationConfig
from tests.indexing.measures import score

Table = npt.NDArray[np.float64]
Found = tuple[str, float, float, float]


class Population:
    """Items as two encoders see them."""

    def __init__(self, seed: int, dims: tuple[int, int] = (24, 20), noise: float = 1.0) -> None:
        g = np.random.default_rng(seed)
        self._maps = [g.normal(size=(8, d)) for d in dims]
        self._noise = noise

    def draw(self, g: np.random.Generator, n: int) -> tuple[Table, Table]:
        z = g.normal(size=(n, 8))
        x, y = (z @ m + self._noise * 2 * g.normal(size=(n, m.shape[1])) for m in self._maps)
        return x, y


def intervals(x: Table, y: Table, fitted: FittedMap, config: AlignConfig) -> Iterator[Found]:
    """Metric, value, low, high of one world."""
    for one in score({0: x}, {0: y}, config):
        assert one.score.low is not None and one.score.high is not None
        yield one.score.metric, one.score.value, one.score.low, one.score.high
    places = np.arange(len(x))
    hits = rank(fitted.map_rows(x), fitted.target_rows(y), places, places).hits(1)
    found = mean_interval(hits, config.bootstrap)
    assert found.low is not None and found.high is not None
    yield "recall@1", found.value, found.low, found.high


def coverage(items: int, worlds: int, draws: int, metrics: tuple[str, ...] = METRICS) -> dict[str, dict[str, float]]:
    """By metric: target, coverage, mean width, and the width that the spread over worlds asks for (3.92 standard deviations)."""
    population = Population(0)
    fitted = fit(*population.draw(np.random.default_rng(1), 300), MapConfig())
    gathered: dict[str, list[tuple[float, float, float]]] = {}
    for world in range(worlds):
        x, y = population.draw(np.random.default_rng(1_000 + world), items)
        config = AlignConfig(
            metrics=metrics,
            k=10,
            bootstrap=BootstrapConfig(draws=draws, seed=world),
            calibration=CalibrationConfig(permutations=0),
        )
        for metric, *numbers in intervals(x, y, fitted, config):
            gathered.setdefault(metric, []).append((numbers[0], numbers[1], numbers[2]))
    return {metric: _summary(np.array(rows)) for metric, rows in gathered.items()}


def _summary(rows: npt.NDArray[Any]) -> dict[str, float]:
    value, low, high = rows.T
    target = value.mean()
    return {
        "target": float(target),
        "coverage": float(((low <= target) & (target <= high)).mean()),
        "width": float((high - low).mean()),
        "width_needed": float(3.92 * value.std()),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--worlds", type=int, default=400)
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--metrics", nargs="*", default=list(METRICS))
    asked = parser.parse_args()
    print("| metric | target | coverage | width | width needed |")
    print("|---|---|---|---|---|")
    for metric, found in coverage(asked.items, asked.worlds, asked.draws, tuple(asked.metrics)).items():
        cells = " | ".join(f"{found[name]:.4f}" for name in ("target", "coverage", "width", "width_needed"))
        print(f"| {metric} | {cells} |")


if __name__ == "__main__":
    main()
