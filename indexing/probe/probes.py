"""Probes: the cross-validated accuracy of a label, by a linear classifier and by nearest neighbours.

Invariant: the features of an item are scaled and classified by models that never saw an item of its scene.

linear: logistic regression (L2, C = 1) on features standardised in the training folds.
knn: majority of the k nearest by cosine among the training folds, exact; a tie of votes goes to the label whose nearest
voter is nearest. An item with a zero vector has no neighbours and is counted wrong.
Chance is the rate of the largest class, which a classifier reaches that has learned nothing.
N items, D dims.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from indexing.search.knn import exact_knn
from indexing.uncertainty.bootstrap import BootstrapConfig, Interval, mean_interval, ratio_interval
from infra.errors import InputError, UsageError
from infra.vectors import Floats, Ids, Mask, Table

KINDS: Final = ("linear", "knn")
ITERATIONS: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How a label is probed."""

    kinds: tuple[str, ...] = KINDS
    folds: int = 5
    k: int = 10
    "Neighbours of the probe knn."
    seed: int = 0
    "Seed of the folds."
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise UsageError(f"There is no probe {kind!r}; there are {' and '.join(KINDS)}.")
        if self.folds < 2 or self.k < 1:
            raise UsageError(
                f"folds is {self.folds} and k is {self.k}; a probe needs 2 folds and 1 neighbour at least."
            )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Accuracy of one probe, over one prediction an item. dropped: items of classes with fewer scenes than folds."""

    kind: str
    accuracy: Interval
    chance: float
    n: int
    classes: int
    dropped: int
    hits_N: Floats


def probe(x_ND: Table, labels_N: Sequence[Any], scenes_N: Sequence[str], config: ProbeConfig) -> list[Probe]:
    """Probe a label by each kind of `config`.

    scenes_N: items of one scene are never on both sides of a fold. Classes with fewer scenes than folds are left out
    and counted. Intervals are over scenes. Raises InputError when fewer than two classes are left.
    """
    _, class_N = np.unique(np.array([str(label) for label in labels_N], str), return_inverse=True)
    _, scene_N = np.unique(np.array([str(scene) for scene in scenes_N], str), return_inverse=True)
    kept_N = _usable(class_N, scene_N, config.folds)
    x = np.asarray(x_ND)[kept_N]
    # Numbered again without gaps: the classes and scenes that are left.
    classes, class_N = np.unique(class_N[kept_N], return_inverse=True)
    _, scene_N = np.unique(scene_N[kept_N], return_inverse=True)
    if len(classes) < 2:
        raise InputError(
            f"Of {len(kept_N):,} labelled items {len(x):,} belong to {len(classes)} classes with {config.folds} or "
            "more scenes; a probe needs two. Give more labels, or fewer --folds."
        )
    folds = list(_folds(x, class_N, scene_N, config))
    found = []
    for kind in config.kinds:
        hits_N = np.zeros(len(class_N))
        for train, test in folds:
            predict = _linear if kind == "linear" else functools.partial(_knn, k=config.k)
            hits_N[test] = predict(x, class_N, train, test) == class_N[test]
        one = Probe(
            kind=kind,
            accuracy=_accuracy(hits_N, scene_N, config),
            chance=float(np.bincount(class_N).max() / len(class_N)),
            n=len(class_N),
            classes=len(classes),
            dropped=int((~kept_N).sum()),
            hits_N=hits_N,
        )
        found.append(one)
    return found


def _usable(class_N: Ids, scene_N: Ids, folds: int) -> Mask:
    """Whether the class of an item has as many scenes as there are folds (N,)."""
    pairs_P2 = np.unique(np.stack([class_N, scene_N], axis=1), axis=0)
    usable: Mask = np.bincount(pairs_P2[:, 0])[class_N] >= folds
    return usable


def _folds(x: Table, class_N: Ids, scene_N: Ids, config: ProbeConfig) -> Iterator[tuple[Ids, Ids]]:
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind, groups = (StratifiedKFold, None) if _is_item_a_scene(scene_N) else (StratifiedGroupKFold, scene_N)
    yield from kind(config.folds, shuffle=True, random_state=config.seed).split(x, class_N, groups)


def _is_item_a_scene(scene_N: Ids) -> bool:
    return int(scene_N.max(initial=-1)) + 1 == len(scene_N)


def _accuracy(hits_N: Floats, scene_N: Ids, config: ProbeConfig) -> Interval:
    """Accuracy over items, with an interval over scenes: items of a scene are drawn together."""
    if _is_item_a_scene(scene_N):
        return mean_interval(hits_N, config.bootstrap)
    sizes_S, hits_S = np.bincount(scene_N).astype(np.float64), np.bincount(scene_N, weights=hits_N).astype(np.float64)
    return ratio_interval(hits_S, sizes_S, config.bootstrap)


def _linear(x: Table, class_N: Ids, train: Ids, test: Ids) -> Ids:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
    with warnings.catch_warnings():
        # A fit that has not converged is scored as it is; the interval is wider than the last digits.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(np.asarray(x[train], np.float64), class_N[train])
    return np.asarray(model.predict(np.asarray(x[test], np.float64)), np.int64)


def _knn(x: Table, class_N: Ids, train: Ids, test: Ids, k: int) -> Ids:
    found = exact_knn(x[train], k=min(k, len(train)), queries_MD=x[test])
    class_T = class_N[train]
    out = np.full(len(test), -1)
    for row, ids in enumerate(found.ids_MK):
        votes = class_T[ids[ids >= 0]].tolist()
        if votes:
            counts = Counter(votes)
            # Votes are nearest first, so the lower index is the nearer voter.
            out[row] = max(counts, key=lambda code: (counts[code], -votes.index(code)))
    return out
