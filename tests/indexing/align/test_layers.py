"""`indexing.align.layers` under `indexing.align.score`: the huh2024 protocol against the public procedure, restated plainly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from indexing.align import kernels
from indexing.align.layers import ProtocolConfig, best_pair, clamp_bound, prepare
from indexing.align.neighbours import NEIGHBOUR_METRICS, neighbour_lists
from indexing.align.score import METRICS, AlignConfig
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.calibration import CalibrationConfig
from infra.errors import InputError, UsageError
from tests.indexing import measures
from tests.indexing.measures import score

Layers = dict[int, npt.NDArray[np.float32]]


def quiet(protocol: ProtocolConfig | None = None, metrics: tuple[str, ...] = ("mutual_knn",)) -> AlignConfig:
    """Values alone."""
    return AlignConfig(
        metrics=metrics,
        k=5,
        protocol=protocol or ProtocolConfig(),
        bootstrap=BootstrapConfig(draws=0),
        calibration=CalibrationConfig(permutations=0),
    )


def encoder(seed: int, layers: int, dims: int, n: int = 50) -> Layers:
    """Layers of growing signal and scale, with outlier coordinates as language models have."""
    g = np.random.default_rng(seed)
    z = np.random.default_rng(99).normal(size=(n, 6))
    made = {}
    for layer in range(layers):
        x = (1 + layer) * (z @ g.normal(size=(6, dims)) * layer / layers + g.normal(size=(n, dims)))
        x[:, 0] += 60
        made[layer] = x.astype(np.float32)
    return made


def public_clamp(layers: Layers, *, exact: bool) -> torch.Tensor:
    """Tensor (N, L, D) with |values| cut at the 95th percentile."""
    feats = torch.stack([torch.from_numpy(x) for x in layers.values()], dim=1)
    if exact:
        bound = feats.reshape(-1).abs().sort().values[int(0.95 * feats.numel())]
    else:
        each = [torch.quantile(item.abs().reshape(-1), 0.95) for item in feats]
        bound = torch.stack(each).mean()
    return torch.clamp(feats, -bound, bound)


def public_score(metric: str, left: Layers, right: Layers, k: int, *, exact: bool) -> tuple[float, tuple[int, int]]:
    x, y = public_clamp(left, exact=exact), public_clamp(right, exact=exact)
    best, pair = 0.0, (0, 0)
    for i in range(x.shape[1]):
        for j in range(y.shape[1]):
            a, b = (torch.nn.functional.normalize(t.double(), dim=-1).numpy() for t in (x[:, i], y[:, j]))
            value = measured(metric, a, b, k)
            if value > best:
                best, pair = value, (i, j)
    return best, pair


def measured(metric: str, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], k: int) -> float:
    """The metric of one pair; its own formula is tested in test_metrics."""
    lists = neighbour_lists(a, k=k), neighbour_lists(b, k=k)
    if metric in NEIGHBOUR_METRICS:
        return float(NEIGHBOUR_METRICS[metric](*lists).mean())
    if metric == "cknna":
        return kernels.CKNNA(a, b, lists).value()
    return {"cka": measures.cka, "unbiased_cka": measures.unbiased_cka, "svcca": measures.svcca}[metric](a, b)


@pytest.mark.parametrize("exact", [False, True])
def test_huh2024_gives_the_number_and_the_layers_of_the_public_procedure(exact: bool) -> None:
    left, right = encoder(0, 3, 16), encoder(1, 2, 24)
    protocol = ProtocolConfig(name="huh2024", exact_quantile=exact)
    found = score(left, right, quiet(protocol, METRICS))
    assert [f.score.metric for f in found] == list(METRICS)
    for one in found:
        value, pair = public_score(one.score.metric, left, right, 5, exact=exact)
        assert one.score.value == pytest.approx(value, abs=1e-5), one.score.metric
        assert (one.score.left_layer, one.score.right_layer) == pair, one.score.metric
        assert ("exact" in one.score.selection) == exact


@pytest.mark.parametrize("exact", [False, True])
def test_the_clamp_is_the_public_one(exact: bool) -> None:
    layers = encoder(2, 3, 7, 31)
    clamped = prepare(layers, ProtocolConfig(name="huh2024", exact_quantile=exact))
    public = public_clamp(layers, exact=exact).numpy()
    assert np.stack(list(clamped.values()), axis=1) == pytest.approx(public, rel=1e-6)
    assert clamp_bound(layers, exact=exact) == pytest.approx(np.abs(public).max(), rel=1e-6)


def test_the_clamp_and_the_search_change_the_number() -> None:
    """Else the tests above would prove little."""
    left, right = encoder(0, 3, 16), encoder(1, 2, 24)
    huh = score(left, right, quiet(ProtocolConfig(name="huh2024")))[0].score
    plain = [score({i: left[i]}, {j: right[j]}, quiet())[0].score.value for i in left for j in right]
    assert len(plain) == 6
    assert len({huh.value, max(plain), plain[0]}) == 3


def test_plain_searches_nothing_and_clamps_nothing() -> None:
    left, right = encoder(0, 2, 8), encoder(1, 1, 8)
    with pytest.raises(InputError, match="compares one layer, and 2 were given"):
        score(left, right, quiet())
    only = {1: left[1]}
    assert prepare(only, ProtocolConfig()) is only
    found = score(only, right, quiet())[0].score
    assert (found.left_layer, found.right_layer, found.protocol) == (1, 0, "plain")
    assert "chosen beforehand" in found.selection


def test_the_search_starts_at_zero_and_never_takes_an_undefined_score() -> None:
    huh = ProtocolConfig(name="huh2024")
    assert best_pair({(0, 0): -0.2, (0, 1): float("nan")}, huh) == (0.0, (0, 0))
    assert best_pair({(0, 0): float("nan"), (0, 1): 0.1, (1, 0): 0.3, (1, 1): 0.3}, huh) == (0.3, (1, 0))
    assert best_pair({(4, 5): -0.2}, ProtocolConfig()) == (-0.2, (4, 5))


def test_wrong_protocols_are_refused() -> None:
    with pytest.raises(UsageError, match="plain and huh2024"):
        ProtocolConfig(name="huh")
    with pytest.raises(UsageError, match="clamps nothing"):
        ProtocolConfig(exact_quantile=True)
