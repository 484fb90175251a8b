"""Maps from one space into another, fitted on pairs: the rotation, and the maps that it is compared with.

Invariant: centring, scale and weights come from the fit pairs alone; the scored rows change none of them.

rotation: W = U V' of the thin SVD X'Y = U S V' maximises tr((X W)' Y) over semi-orthogonal W (Schoenemann 1966). For D
> E the columns of W are orthonormal: it is a projection, lengths shrink, and mapped rows are normalised again. There,
and whenever |X W|_F depends on W, the largest trace is not the least square; we choose the trace. With fewer pairs than
dims X'Y has a rank below min(D, E), and the rest of W is arbitrary, though orthonormal: see `rank` in the facts.
linear: the minimum-norm least squares solution, W = pinv(X) Y.
ridge: W = (X'X + alpha n s I)^-1 X'Y with s = tr(X'X) / (n D), so that alpha has no unit; held-out fit pairs choose it.
mlp: one hidden layer, see `indexing.rotate.perceptron`.
random: a semi-orthogonal W that saw no pair. It should find 1 in N, as should a map fitted on shuffled pairs.

Legend: N pairs, D dims of the space that is mapped, E of the one it is mapped into.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import scipy.linalg

from indexing.scores.tables import check_finite, check_rows
from infra.errors import InputError, UsageError
from infra.vectors import Floats, Mask, Table, unit_rows

KINDS: Final = ("rotation", "linear", "ridge", "mlp", "random")
ALPHAS: Final = tuple(10.0**power for power in range(-4, 4))
HELD_OUT: Final = 0.2
"Share of the fit pairs on which ridge chooses alpha and mlp its last epoch."
FLAT: Final = 1e-9
"A centred row shorter than this share of the row is rounding of the mean itself, so it becomes zero."


@dataclass(frozen=True, kw_only=True)
class MapConfig:
    """Which map is fitted, and how the rows are prepared."""

    kind: str = "rotation"
    "rotation, linear, ridge, mlp or random."
    centre: bool = True
    "Subtract the mean of the fit rows on both sides."
    unit: bool = False
    "Bring fit rows to length 1 after centring, as in the unpaired protocol of arXiv 2610.09411."
    seed: int = 0
    "Of the random map, of the part that ridge and mlp hold out, and of mlp's weights."

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"There is no map {self.kind!r}. There are {', '.join(KINDS)}.")


@dataclass(frozen=True, kw_only=True)
class FittedMap:
    """A map with the statistics of its fit pairs. facts: plain numbers to report (rank, alpha, epochs)."""

    config: MapConfig
    x_mean_D: Floats
    y_mean_E: Floats
    weights: Mapping[str, Floats]
    facts: Mapping[str, float] = field(default_factory=dict)

    def map_rows(self, x_ND: Table) -> Floats:
        """Rows of the first space as unit rows (N, E) of the second; a row that the centring leaves empty is zero."""
        x = prepared(x_ND, self.x_mean_D, unit=self.config.unit)
        if self.config.kind == "mlp":
            hidden = np.maximum(x @ self.weights["in"] + self.weights["in_bias"], 0)
            mapped = hidden @ self.weights["out"] + self.weights["out_bias"]
            # The biases would give a row without a direction one.
            mapped[~x.any(axis=1)] = 0
        else:
            mapped = x @ self.weights["w"]
        return unit_rows(mapped)

    def target_rows(self, y_NE: Table) -> Floats:
        """Rows of the second space as the unit rows (N, E) that mapped rows are compared with."""
        return unit_rows(prepared(y_NE, self.y_mean_E, unit=False))


def fit(x_ND: Table, y_NE: Table, config: MapConfig) -> FittedMap:
    """Fit a map on N pairs. Raises InputError for unequal or too few rows and for values that are not finite."""
    _check(x_ND, y_NE)
    x_mean_D, y_mean_E = (
        np.asarray(t, np.float64).mean(axis=0) if config.centre else np.zeros(t.shape[1]) for t in (x_ND, y_NE)
    )
    x, y = prepared(x_ND, x_mean_D, unit=config.unit), prepared(y_NE, y_mean_E, unit=config.unit)
    weights, facts = _fit_weights(x, y, config)
    return FittedMap(config=config, x_mean_D=x_mean_D, y_mean_E=y_mean_E, weights=weights, facts=facts)


def _fit_weights(x: Floats, y: Floats, config: MapConfig) -> tuple[Mapping[str, Floats], Mapping[str, float]]:
    if config.kind == "rotation":
        w, rank = polar(x.T @ y)
        return {"w": w}, {"rank": rank}
    if config.kind == "linear":
        w, _, rank, _ = scipy.linalg.lstsq(x, y)
        return {"w": np.asarray(w)}, {"rank": float(rank)}
    if config.kind == "ridge":
        alpha = _chosen_alpha(x, y, config)
        return {"w": ridge(x, y, alpha)}, {"alpha": alpha}
    if config.kind == "mlp":
        from indexing.rotate.perceptron import fit_perceptron

        return fit_perceptron(x, y, _held_out(len(x), config), seed=config.seed)
    return {"w": random_rotation(x.shape[1], y.shape[1], config.seed)}, {}


def polar(cross_DE: Floats) -> tuple[Floats, float]:
    """U V' of the thin SVD, and the rank of the matrix."""
    try:
        u, s, vt = scipy.linalg.svd(cross_DE, full_matrices=False)
    except scipy.linalg.LinAlgError:
        # Divide and conquer does not converge on some rank-deficient inputs; this slower driver does.
        u, s, vt = scipy.linalg.svd(cross_DE, full_matrices=False, lapack_driver="gesvd")
    threshold = s.max(initial=0.0) * max(cross_DE.shape) * np.finfo(np.float64).eps
    return np.asarray(u @ vt), float((s > threshold).sum())


def random_rotation(dims_from: int, dims_to: int, seed: int) -> Floats:
    """A semi-orthogonal (D, E) matrix, uniform over all of them: the polar factor of a Gaussian one."""
    return polar(np.random.Generator(np.random.PCG64(seed)).normal(size=(dims_from, dims_to)))[0]


def ridge(x_ND: Floats, y_NE: Floats, alpha: float) -> Floats:
    """(X'X + alpha n s I)^-1 X'Y, s = tr(X'X) / (n D); for n < D by the equal dual form X'(XX' + alpha n s I)^-1 Y."""
    n, d = x_ND.shape
    if not x_ND.any():
        return np.zeros((d, y_NE.shape[1]))
    penalty = alpha * float(np.square(x_ND).sum()) / d
    if n < d:
        return np.asarray(
            x_ND.T @ scipy.linalg.solve(x_ND @ x_ND.T + penalty * np.eye(n), y_NE, assume_a="pos"), np.float64
        )
    return np.asarray(scipy.linalg.solve(x_ND.T @ x_ND + penalty * np.eye(d), x_ND.T @ y_NE, assume_a="pos"))


def _chosen_alpha(x: Floats, y: Floats, config: MapConfig) -> float:
    """The alpha whose map brings held-out fit pairs nearest to their partners, by mean cosine."""
    held = _held_out(len(x), config)
    targets = unit_rows(y[held])
    cosines = [(unit_rows(x[held] @ ridge(x[~held], y[~held], alpha)) * targets).sum(axis=1).mean() for alpha in ALPHAS]
    return ALPHAS[int(np.argmax(cosines))]


def _held_out(n: int, config: MapConfig) -> Mask:
    """Mask (N,) of the fit pairs that choose and do not fit."""
    if n < 5:
        raise InputError(f"There are {n} fit pairs, and {config.kind} needs 5: it holds some out. Give more.")
    order = np.random.Generator(np.random.PCG64(config.seed)).permutation(n)
    mask = np.zeros(n, np.bool_)
    mask[order[: max(1, int(HELD_OUT * n))]] = True
    return mask


def prepared(x_ND: Table, mean_D: Floats, *, unit: bool) -> Floats:
    """Rows minus the mean, in float64; rows of nothing but rounding become zero; to length 1 if `unit`.

    Raises InputError for rows of other dims and for rows that hold NaN or an infinity.
    """
    x = np.asarray(x_ND, np.float64)
    if x.ndim != 2 or x.shape[1] != len(mean_D):
        raise InputError(
            f"The map was fitted for {len(mean_D)} dims, and the rows have shape {x.shape}. "
            "Use the embedding set's own map."
        )
    # A row of NaN ties with no row and would rank first, so it is refused here too and not only among the fit pairs.
    check_finite(x)
    centred = x - mean_D
    flat = np.linalg.norm(centred, axis=1) <= FLAT * np.linalg.norm(x, axis=1)
    centred[flat] = 0
    return unit_rows(centred) if unit else centred


def _check(x_ND: Table, y_NE: Table) -> None:
    check_rows(x_ND, y_NE)
    if len(x_ND) < 2:
        raise InputError(f"There are {len(x_ND)} fit pairs; a map needs at least 2. Give more.")
    for name, table in (("left", x_ND), ("right", y_NE)):
        check_finite(np.asarray(table, np.float64), f" of the {name} side")
