"""Protocols: how the layers of both encoders are prepared, and which pair of them is scored.

`plain` compares one layer each, as it is; `huh2024` clamps outliers and takes the best of all pairs of layers.
Invariant: clamping and layer search happen here and nowhere else.

`huh2024` is the procedure of the public platonic-rep code: absolute values are cut at the 95th percentile of all layers
together, each layer is normalised, and the score is the largest over all pairs of layers, and at least 0. By chance
alone a maximum over many pairs exceeds the score of a pair chosen beforehand; only its calibrated value accounts for
that. For pictures the public code compares the outputs of blocks 1 to L before the final norm (timm); sets of
`goodviews embed` hold the last layer after that norm, and under the pooling cls no layer 0 either.

Source: Huh et al. 2024 (arXiv 2405.07987) and their public code. N items, L layers, D dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from infra.errors import InputError, UsageError
from infra.vectors import Table

PROTOCOLS: Final = ("plain", "huh2024")
QUANTILE: Final = 0.95

Layers: TypeAlias = Mapping[int, Table]
"""Number of a layer -> its rows (N, D); all layers of one encoder have equal shapes."""


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How layers are prepared and chosen."""

    name: str = "plain"
    "plain or huh2024."
    exact_quantile: bool = False
    "huh2024: the quantile of all absolute values, at place int(.95 * number); else the mean of the items' quantiles."

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            raise UsageError(f"There is no protocol {self.name!r}; there are {' and '.join(PROTOCOLS)}.")
        if self.exact_quantile and self.name == "plain":
            raise UsageError("The exact quantile is part of the protocol huh2024; `plain` clamps nothing.")

    @property
    def selection(self) -> str:
        """How the layers of a score were chosen, for its row."""
        if self.name == "plain":
            return "one pair of layers, chosen beforehand"
        kind = "exact" if self.exact_quantile else "mean over items"
        return f"best of all pairs of layers, from 0; clamped at the 95th percentile ({kind})"


def prepare(layers: Layers, config: ProtocolConfig) -> Layers:
    """The layers as the protocol compares them. Raises InputError when `plain` is given several."""
    if config.name == "plain":
        if len(layers) != 1:
            raise InputError(f"The protocol plain compares one layer, and {len(layers)} were given. Name one.")
        return layers
    bound = clamp_bound(layers, exact=config.exact_quantile)
    return {number: np.clip(np.asarray(x, np.float32), -bound, bound) for number, x in layers.items()}


def clamp_bound(layers: Layers, *, exact: bool) -> np.float32:
    """The absolute value above which an entry is an outlier, over all N x L x D entries, in float32."""
    stacked_NLD = np.stack([np.abs(np.asarray(x, np.float32)) for x in layers.values()], axis=1)
    if exact:
        place = int(QUANTILE * stacked_NLD.size)
        return np.float32(np.partition(stacked_NLD.reshape(-1), place)[place])
    quantiles_N = np.quantile(stacked_NLD.reshape(len(stacked_NLD), -1), QUANTILE, axis=1)
    return np.float32(quantiles_N.mean())


def best_pair(scores: Mapping[tuple[int, int], float], config: ProtocolConfig) -> tuple[float, tuple[int, int]]:
    """The score of a grid of layer pairs, and its pair.

    plain: the only one. huh2024: the first largest; a grid without a positive score gives 0 and its first pair.
    """
    if config.name == "plain":
        ((pair, value),) = scores.items()
        return value, pair
    # Strictly greater: a NaN is never the best, and of equal scores the first one is.
    best, chosen = 0.0, next(iter(scores))
    for pair, value in scores.items():
        if value > best:
            best, chosen = value, pair
    return best, chosen
