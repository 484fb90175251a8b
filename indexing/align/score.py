"""The list of metrics, and the score of two encoders by each: chance, calibration, ties and interval.

Invariant: value, chance and interval belong to the same items, the same pair of layers and the same metric.

Intervals: metrics of neighbours resample the contributions of the items. CKA, unbiased CKA and CKNNA weigh the items in
the formula itself. SVCCA is computed anew, and its draws are centred on the value. Kernels cost more, so they take
fewer draws (`Score.draws`), and CKA of very many items takes none (`why_no_interval`). Under `huh2024` all draws are of
the chosen pair of layers. N items.

Coverage of 95 % intervals, measured over 400 worlds of 200 items (tests/experiments/interval_coverage.py): R@1 .97, CKA
.96, unbiased CKA .96, CKNNA 1.00 (too wide), cycle .93, edit .91, LCS .87, mutual k-NN .84. Neighbours are held fixed,
so the noise that an item adds to the lists of others is left out; an interval of mutual k-NN is a quarter too narrow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from indexing.align.kernels import CKA, CKNNA, SVCCA, Kernel
from indexing.align.layers import Layers, ProtocolConfig, best_pair, prepare
from indexing.align.neighbours import NEIGHBOUR_METRICS, NeighbourLists, neighbour_lists
from indexing.uncertainty import bootstrap
from indexing.uncertainty.bootstrap import BootstrapConfig, Interval
from indexing.uncertainty.calibration import Calibration, CalibrationConfig, calibrate
from infra.errors import InputError, UsageError
from infra.vectors import Floats, Ids, Table

KERNEL_METRICS: Final = ("cka", "unbiased_cka", "cknna", "svcca")
PAIRED_METRICS: Final = ("cka", "unbiased_cka")
METRICS: Final = (*NEIGHBOUR_METRICS, *KERNEL_METRICS)

KERNEL_DRAWS: Final = 1_000
COSTLY_DRAWS: Final = 200
"Most draws of SVCCA, and of a kernel over COSTLY_ITEMS or more items."
COSTLY_ITEMS: Final = 5_000
MOST_PAIRED_ITEMS: Final = 100_000
"Above this many items CKA has no interval, since a draw weighs all pairs of them."


@dataclass(frozen=True, kw_only=True)
class AlignConfig:
    """What to score and how."""

    metrics: tuple[str, ...] = ("mutual_knn",)
    "Of METRICS."
    k: int = 10
    "Neighbours, for the metrics that have any."
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        if not self.metrics:
            raise UsageError(f"No metric is named. There are {', '.join(METRICS)}.")
        for metric in self.metrics:
            if metric not in METRICS:
                raise UsageError(f"There is no metric {metric!r}. There are {', '.join(METRICS)}.")


@dataclass(frozen=True, kw_only=True)
class Score:
    """The value of one metric, with its interval, chance, ties and pair of layers.

    chance: score of independent spaces; k / (N - 1) for mutual k-NN of one pair of layers, else the mean of the
    shuffled scores (under huh2024: of their maxima), None without any. ties: share of items whose list ends inside a
    tie, the larger of both sides; None for a metric without neighbours. undefined: items whose vector is zero on a
    side. draws: bootstrap draws behind low and high.
    """

    metric: str
    value: float
    low: float | None
    high: float | None
    chance: float | None
    calibrated: float | None
    p_value: float | None
    threshold: float | None
    k: int | None
    n: int
    ties: float | None
    undefined: int
    draws: int
    left_layer: int
    right_layer: int
    protocol: str
    selection: str


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A score, and the contributions (N,) or the values under the drawn items (B,) that a paired difference needs."""

    score: Score
    contributions_N: Floats | None
    draws_B: Floats | None


class Side:
    """The prepared layers of one encoder; neighbours are searched once a layer."""

    def __init__(self, layers: Layers, config: AlignConfig) -> None:
        self.layers = prepare(layers, config.protocol)
        self._k = config.k
        self._lists: dict[int, NeighbourLists] = {}
        first = next(iter(self.layers.values()))
        self.n = len(first)
        self.undefined = int((~np.any(first, axis=1)).sum())

    def lists(self, layer: int) -> NeighbourLists:
        """The k nearest neighbours of each item in that layer."""
        if layer not in self._lists:
            self._lists[layer] = neighbour_lists(self.layers[layer], k=self._k)
        return self._lists[layer]


def score_sides(left: Side, right: Side, config: AlignConfig) -> list[Scored]:
    """The metrics of `config` between two encoders, in its order; row i is one item on both sides.

    Raises InputError when the sides differ in N, for too few items, and for rows that hold NaN or an infinity.
    """
    if left.n != right.n:
        raise InputError(
            f"The left side has {left.n:,} items and the right {right.n:,}; row i must be the same item on both. "
            "Join them by key first."
        )
    return [_score(metric, left, right, config) for metric in config.metrics]


def values_of(left: Side, right: Side, config: AlignConfig) -> list[float | None]:
    """Values alone, without intervals and permutations; None for a metric that needs more items."""
    bare = dataclasses.replace(
        config,
        bootstrap=dataclasses.replace(config.bootstrap, draws=0),
        calibration=dataclasses.replace(config.calibration, permutations=0),
    )
    found: list[float | None] = []
    for metric in config.metrics:
        try:
            (one,) = score_sides(left, right, dataclasses.replace(bare, metrics=(metric,)))
            found.append(one.score.value)
        except InputError:
            found.append(None)
    return found


def permuted_values(metric: str, x_ND: Table, y_NE: Table, *, k: int) -> Callable[[Ids | None], float]:
    """The metric of two tables as a function of the order (N,) of the rows of the second one; None: as they are.

    Neighbours are searched once. Raises UsageError for an unknown metric, InputError for too few items.
    """
    config = AlignConfig(metrics=(metric,), k=k)
    grid = _Grid(metric, Side({0: x_ND}, config), Side({0: y_NE}, config), config.protocol)
    return lambda order_N: grid.best(order_N)[0]


def why_no_interval(metric: str, n: int) -> str | None:
    """Why a metric takes no bootstrap draws over n items; None where it takes them."""
    if metric not in PAIRED_METRICS or n <= MOST_PAIRED_ITEMS:
        return None
    return (
        f"{metric} over {n:,} items has no interval, since every draw would weigh every pair of them; "
        f"score {MOST_PAIRED_ITEMS:,} or fewer (--keys) for one"
    )


def difference(left: Scored, right: Scored, config: AlignConfig) -> Interval:
    """Value of one system minus that of another on the same items, with the interval of the paired difference.

    Raises InputError when the two are not of one metric over one set of items.
    """
    a, b = left.score, right.score
    if (a.metric, a.n, a.k, a.protocol) != (b.metric, b.n, b.k, b.protocol):
        raise InputError(
            f"{a.metric} over {a.n:,} items and {b.metric} over {b.n:,} are not paired, so their difference has no "
            "interval. Score both on the same items."
        )
    if left.contributions_N is not None and right.contributions_N is not None:
        return bootstrap.difference_interval(left.contributions_N, right.contributions_N, config.bootstrap)
    # Draws depend on seed and N alone, so draw b of both systems holds the same items.
    if left.draws_B is None or right.draws_B is None or len(left.draws_B) != len(right.draws_B):
        return Interval(value=a.value - b.value, low=None, high=None)
    return bootstrap.interval_of(a.value - b.value, left.draws_B - right.draws_B, config.bootstrap)


def _score(metric: str, left: Side, right: Side, config: AlignConfig) -> Scored:
    grid = _Grid(metric, left, right, config.protocol)
    value, pair = grid.best(None)
    largest = float(config.k) if metric == "lcs_knn" else 1.0
    # A shuffled score is the best of all pairs of layers too, so that a maximum is compared with maxima.
    calibration = calibrate(value, lambda order: grid.best(order)[0], left.n, config.calibration, largest=largest)
    contributions_N, draws_B, drawing = None, None, config.bootstrap
    if metric in NEIGHBOUR_METRICS:
        contributions_N = grid.contributions(pair)
        interval = bootstrap.mean_interval(contributions_N, drawing)
    else:
        drawing = _fewer(metric, left.n, drawing)
        is_paired = metric in PAIRED_METRICS
        draws_B = bootstrap.weighted_values(grid.kernel(pair).weighted, left.n, drawing, at_once=is_paired)
        if metric == "svcca" and len(draws_B):
            # Copies of an item correlate with themselves, which raises every draw; only the spread is right.
            draws_B += value - draws_B.mean()
        interval = bootstrap.interval_of(value, draws_B, drawing)
    with_lists = metric in NEIGHBOUR_METRICS or metric == "cknna"
    found = Score(
        metric=metric,
        value=value,
        low=interval.low,
        high=interval.high,
        chance=_chance(metric, (left, right), config, calibration),
        calibrated=None if calibration is None else calibration.calibrated,
        p_value=None if calibration is None else calibration.p_value,
        threshold=None if calibration is None else calibration.threshold,
        k=config.k if with_lists else None,
        n=left.n,
        ties=max(left.lists(pair[0]).tie_rate, right.lists(pair[1]).tie_rate) if with_lists else None,
        undefined=max(left.undefined, right.undefined),
        draws=drawing.draws if interval.low is not None else 0,
        left_layer=pair[0],
        right_layer=pair[1],
        protocol=config.protocol.name,
        selection=config.protocol.selection,
    )
    return Scored(score=found, contributions_N=contributions_N, draws_B=draws_B)


def _chance(
    metric: str, sides: tuple[Side, Side], config: AlignConfig, calibration: Calibration | None
) -> float | None:
    """See `Score`. A maximum over pairs of layers is above k / (N - 1) by chance alone."""
    if metric == "mutual_knn" and all(len(side.layers) == 1 for side in sides):
        return config.k / (sides[0].n - 1)
    return None if calibration is None else calibration.mean


class _Grid:
    """One metric over all pairs of layers."""

    def __init__(self, metric: str, left: Side, right: Side, protocol: ProtocolConfig) -> None:
        self._metric, self._left, self._right, self._protocol = metric, left, right, protocol
        self._pairs = [(i, j) for i in left.layers for j in right.layers]

    def best(self, order_N: Ids | None) -> tuple[float, tuple[int, int]]:
        """The score that the protocol takes, and its pair of layers."""
        return best_pair(self.values(order_N), self._protocol)

    def values(self, order_N: Ids | None) -> Mapping[tuple[int, int], float]:
        """The metric of each pair, with the items of the right side in this order."""
        if self._metric not in NEIGHBOUR_METRICS:
            return {pair: self.kernel(pair).value(order_N) for pair in self._pairs}
        contribute = NEIGHBOUR_METRICS[self._metric]
        rights = {j: self._right.lists(j) for j in self._right.layers}
        if order_N is not None:
            rights = {j: lists.permuted(order_N) for j, lists in rights.items()}
        return {(i, j): float(contribute(self._left.lists(i), rights[j]).mean()) for i, j in self._pairs}

    def contributions(self, pair: tuple[int, int]) -> Floats:
        """The contribution of each item (N,)."""
        return NEIGHBOUR_METRICS[self._metric](self._left.lists(pair[0]), self._right.lists(pair[1]))

    @functools.cache  # noqa: B019  a grid lives as long as the scoring of one metric
    def kernel(self, pair: tuple[int, int]) -> Kernel:
        """The kernel metric of one pair of layers, whose decompositions all permutations share."""
        x_ND, y_NE = self._left.layers[pair[0]], self._right.layers[pair[1]]
        if self._metric == "cknna":
            return CKNNA(x_ND, y_NE, (self._left.lists(pair[0]), self._right.lists(pair[1])))
        if self._metric == "svcca":
            return SVCCA(x_ND, y_NE)
        return CKA(x_ND, y_NE, unbiased=self._metric == "unbiased_cka")


def _fewer(metric: str, n: int, config: BootstrapConfig) -> BootstrapConfig:
    if why_no_interval(metric, n):
        return dataclasses.replace(config, draws=0)
    most = COSTLY_DRAWS if metric == "svcca" or n >= COSTLY_ITEMS else KERNEL_DRAWS
    return dataclasses.replace(config, draws=min(config.draws, most))
