"""Probes: the cross-validated accuracy of a label, by a linear classifier and by nearest neighbours.

Invariant: the features of an item are scaled and classified by models that never saw an item of its scene.

linear: logistic regression (L2, C = 1) on features standardised in the training folds.
knn: majority of the k nearest by cosine among the training folds, exact; a tie of votes goes to the label whose nearest
voter is nearest. An item with a zero vector has no neighbours and is counted wrong.
Chance is the rate of the largest class, which a classifier reaches that has learned nothing.
N items, D dims.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from indexing.search.knn import exact_knn
from indexing.sets.joins import Keys
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
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise UsageError(f"There is no probe {unknown[0]!r}; there are {' and '.join(KINDS)}.")
        if self.folds < 2 or self.k < 1:
            raise UsageError(
                f"folds is {self.folds} and k is {self.k}; a probe needs 2 folds and 1 neighbour at least."
            )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Accuracy of one probe over all items, each predicted once. dropped: items of classes with fewer scenes than folds."""

    kind: str
    accuracy: Interval
    chance: float
    n: int
    classes: int
    dropped: int
    hits_N: Floats


def probe(x_ND: Table, labels_N: Sequence[Any], scenes_N: Sequence[str], config: ProbeConfig) -> list[Probe]:
    """Probe a label by each kind of `config`.

    scenes_N: items of one scene are never on both sides of a fold. Classes with fewer scenes than folds are left out and
    counted. Intervals are over scenes. Raises InputError when fewer than two classes are left.
    """
    names = np.array([str(label) for label in labels_N], object)
    scenes = np.array([str(scene) for scene in scenes_N], object)
    kept = _usable(names, scenes, config.folds)
    x, names, scenes = np.asarray(x_ND)[kept], names[kept], scenes[kept]
    classes, codes_N = np.unique(names.astype(str), return_inverse=True)
    if len(classes) < 2:
        raise InputError(
            f"Of {len(kept):,} labelled items {int(kept.sum()):,} belong to {len(classes)} classes with {config.folds} or "
            "more scenes; a probe needs two. Give more labels, or fewer --folds."
        )
    chance = Counter(codes_N.tolist()).most_common(1)[0][1] / len(codes_N)
    folds = list(_folds(x, codes_N, scenes, config))
    made = []
    for kind in config.kinds:
        hits_N = np.zeros(len(codes_N))
        for train, test in folds:
            predicted = (
                _linear(x, codes_N, train, test) if kind == "linear" else _knn(x, codes_N, train, test, config.k)
            )
            hits_N[test] = predicted == codes_N[test]
        accuracy = mean_interval(hits_N, config.bootstrap) if _alone(scenes) else _by_scene(hits_N, scenes, config)
        made.append(
            Probe(
                kind=kind,
                accuracy=accuracy,
                chance=chance,
                n=len(codes_N),
                classes=len(classes),
                dropped=int((~kept).sum()),
                hits_N=hits_N,
            )
        )
    return made


def _usable(names: Keys, scenes: Keys, folds: int) -> Mask:
    """Whether the class of an item has as many scenes as there are folds."""
    _, code_N = np.unique(names.astype(str), return_inverse=True)
    _, scene_N = np.unique(scenes.astype(str), return_inverse=True)
    pairs_P2 = np.unique(np.stack([code_N, scene_N], axis=1), axis=0)
    scenes_of_class = np.bincount(pairs_P2[:, 0])
    usable: Mask = scenes_of_class[code_N] >= folds
    return usable


def _folds(x: Table, codes_N: Ids, scenes: Keys, config: ProbeConfig) -> Iterator[tuple[Ids, Ids]]:
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind, groups = (StratifiedKFold, None) if _alone(scenes) else (StratifiedGroupKFold, scenes)
    yield from kind(config.folds, shuffle=True, random_state=config.seed).split(x, codes_N, groups)


def _alone(scenes: Keys) -> bool:
    return len(set(scenes)) == len(scenes)


def _linear(x: Table, codes_N: Ids, train: Ids, test: Ids) -> Ids:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
    with warnings.catch_warnings():
        # A fit that has not converged is scored as it is; the interval is wider than the last digits.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(np.asarray(x[train], np.float64), codes_N[train])
    return np.asarray(model.predict(np.asarray(x[test], np.float64)), np.int64)


def _knn(x: Table, codes_N: Ids, train: Ids, test: Ids, k: int) -> Ids:
    found = exact_knn(x[train], k=min(k, len(train)), queries_MD=x[test])
    codes_T = codes_N[train]
    out = np.full(len(test), -1)
    for row, ids in enumerate(found.ids_MK):
        votes = codes_T[ids[ids >= 0]].tolist()
        if votes:
            counts = Counter(votes)
            out[row] = max(counts, key=lambda code: (counts[code], -votes.index(code)))
    return out


def _by_scene(hits_N: Floats, scenes: Keys, config: ProbeConfig) -> Interval:
    """Accuracy over items with an interval over scenes: items of a scene are drawn together."""
    _, place_N = np.unique(scenes.astype(str), return_inverse=True)
    sizes_S, hits_S = np.bincount(place_N).astype(np.float64), np.bincount(place_N, weights=hits_N).astype(np.float64)
    return ratio_interval(hits_S, sizes_S, config.bootstrap)
