"""`trainer.model.objectives` in one process: the check values of algorithms.md 1, and the plain formulas written out.

The same losses on several processes are in test_distributed.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infra.errors import ConfigError, InputError
from tests.trainer.sigreg import sigreg_statistics, weight_of_lambda
from trainer.data.ragged import Ragged
from trainer.model.encoder import SIZES, TextEncoder
from trainer.model.objectives import (
    LejepaConfig,
    LejepaModel,
    NextTokenModel,
    characteristic_sums,
    directions,
    lejepa,
    next_token,
)

CONFIG = LejepaConfig(weight=1.0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain(x: Tensor, a: Tensor, config: LejepaConfig) -> Tensor:
    """T_s / N by the formula of algorithms.md 1, all knots and rows at once, for autograd."""
    t = torch.linspace(0, config.t_max, config.n_knots, dtype=x.dtype)
    weights = torch.full_like(t, 2 * config.t_max / (config.n_knots - 1))
    weights[[0, -1]] /= 2
    phi = torch.exp(-(t**2) / 2)
    angles = (x @ a)[:, :, None] * t
    return ((angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2) @ (weights * phi)


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x)
    return grad


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach() - wanted.detach()).norm() / wanted.detach().norm())


def test_collapse_scores_040205_a_row() -> None:
    statistics = sigreg_statistics(torch.zeros(512, 64, dtype=torch.float64), 0, CONFIG)
    assert statistics.shape == (1024,)
    assert torch.allclose(statistics, torch.full_like(statistics, 0.40205 * 512), rtol=1e-5)


def test_standard_normal_rows_score_10525_on_average() -> None:
    # E|mean e^{itx} - phi|^2 = (1 - phi^2) / N, so E[T] = sum w phi (1 - phi^2) = 1.0525 whatever N is. Over 40 draws
    # the mean of 1,024 correlated directions has a standard error near .01.
    means = [float(sigreg_statistics(normal(256, 64, seed=seed), seed, CONFIG).mean()) for seed in range(40)]
    assert sum(means) / len(means) == pytest.approx(1.0525, rel=0.03)


def test_eight_equal_views_score_eight_times_one() -> None:
    """algorithms.md quotes one draw, about 9.2; the expectation is 8 x 1.0525 = 8.42, not 1.

    Equal views are no new rows.
    """
    config, means = replace(CONFIG, n_directions=256), []
    for seed in range(8):
        x = normal(512, 64, seed=seed)
        copies, once = (sigreg_statistics(rows, seed, config) for rows in (x.repeat(8, 1), x))
        assert relative(copies, 8 * once) < 1e-9
        means.append(float(copies.mean()))
    assert sum(means) / len(means) == pytest.approx(8.42, rel=0.05)
    assert all(6 < mean < 11 for mean in means), means


def test_half_scale_normal_rows_score_about_78() -> None:
    assert float(sigreg_statistics(0.5 * normal(512, 64), 0, CONFIG).mean()) == pytest.approx(78, rel=0.03)


@given(
    rows=st.integers(1, 40), dimensions=st.integers(1, 9),
    n_directions=st.integers(1, 30), n_knots=st.sampled_from([3, 5, 17, 41]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_statistic_and_gradient_are_the_plain_formulas(
    rows: int, dimensions: int, n_directions: int, n_knots: int, scale: float, seed: int
) -> None:
    config = replace(CONFIG, n_directions=n_directions, n_knots=n_knots)
    x = (scale * normal(rows, dimensions, seed=seed)).requires_grad_()
    a = directions(seed, dimensions, config, like=x)
    found, wanted = sigreg_statistics(x, seed, config), rows * plain(x, a, config)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    upstream = normal(n_directions, seed=seed + 1)
    assert torch.allclose(gradient(found @ upstream, x), gradient(wanted @ upstream, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("rows", "n_directions"), [(2048, 20), (5000, 3), (3, 12_000)])
def test_tiles_of_rows_and_directions_change_nothing(rows: int, n_directions: int) -> None:
    config = replace(CONFIG, n_directions=n_directions)
    x = normal(rows, 4).requires_grad_()
    a = directions(0, 4, config, like=x)
    found, wanted = sigreg_statistics(x, 0, config).sum(), rows * plain(x, a, config).sum()
    assert relative(found, wanted) < 1e-10
    assert relative(gradient(found, x), gradient(wanted, x)) < 1e-10


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_float32_agrees_with_float64_to_1e_5(scale: float) -> None:
    x = scale * normal(1024, 32)
    results = []
    for dtype in (torch.float64, torch.float32):
        rows = x.to(dtype).requires_grad_()
        mean = sigreg_statistics(rows, 3, replace(CONFIG, n_directions=64)).mean()
        results.append((mean.double(), gradient(mean, rows).double()))
    assert relative(results[1][0], results[0][0]) < 1e-5
    assert relative(results[1][1], results[0][1]) < 1e-4  # at scale 20 the plain formula is no better: angles are large


def test_derivatives_pass_a_numerical_check() -> None:
    config = replace(CONFIG, n_directions=3, n_knots=5)
    x = normal(4, 3).requires_grad_()
    a = directions(0, 3, config, like=x)
    assert torch.autograd.gradcheck(lambda rows: characteristic_sums(rows, a, config), (x,))


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x = normal(4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(sigreg_statistics(x, 0, replace(CONFIG, n_directions=2)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(grad.sum())


def test_directions_are_units_of_the_step_alone() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    first = directions(5, 16, CONFIG, like=like)
    assert torch.allclose(first.norm(dim=0), torch.ones(1024, dtype=torch.float64))
    torch.manual_seed(123)
    assert torch.equal(directions(5, 16, CONFIG, like=like), first)
    assert not torch.allclose(directions(6, 16, CONFIG, like=like), first)
    assert not torch.allclose(directions(5, 16, replace(CONFIG, direction_seed=1), like=like), first)
    assert torch.allclose(directions(5, 16, CONFIG, like=like.float()).double(), first, atol=1e-6)


@given(views=st.integers(1, 5), samples=st.integers(1, 6), dimensions=st.integers(1, 5), data=st.data())
@settings(max_examples=40)
def test_lejepa_is_its_two_terms(views: int, samples: int, dimensions: int, data: st.DataObject) -> None:
    n_global = data.draw(st.integers(1, views))
    config = replace(CONFIG, weight=2.5, n_directions=8)
    z = normal(views, samples, dimensions, seed=views).requires_grad_()
    terms = lejepa(z, n_global, 4, config)
    inv = ((z[:n_global].mean(0) - z) ** 2).mean()
    sigreg = plain(z.reshape(-1, dimensions), directions(4, dimensions, config, like=z), config).mean()
    wanted = inv + 2.5 * sigreg
    assert terms.to_floats() == pytest.approx(
        {
            "loss": wanted.item(), "inv": inv.item(), "sigreg": sigreg.item(),
            "statistic": sigreg.item() * views * samples, "weight": 2.5,
        }
    )  # fmt: skip
    assert torch.allclose(gradient(terms.loss, z), gradient(wanted, z), rtol=1e-9, atol=1e-12)


def test_equal_views_have_no_invariance_loss_and_order_of_samples_does_not_matter() -> None:
    z = normal(1, 6, 5).expand(4, 6, 5)
    terms = lejepa(z, 2, 0, CONFIG)
    assert float(terms.inv) < 1e-30
    assert torch.allclose(lejepa(z.flip(1), 2, 0, CONFIG).loss, terms.loss)


def test_losses_are_float32_under_autocast() -> None:
    z = normal(4, 32, 16, dtype=torch.float32).requires_grad_()
    wanted = lejepa(z, 2, 0, CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lejepa(z, 2, 0, CONFIG)
        found_gradient = gradient(found.loss, z)
    assert found.loss.dtype == torch.float32
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(found_gradient, gradient(wanted.loss, z))
    assert lejepa(z.to(torch.bfloat16), 2, 0, CONFIG).loss.dtype == torch.float32


def test_nan_reaches_the_loss_so_that_the_alarm_can_ring() -> None:
    z = normal(4, 8, 5)
    z[1, 2, 3] = torch.nan
    assert lejepa(z, 2, 0, CONFIG).loss.isnan()


@pytest.mark.parametrize(("shape", "n_global"), [((4, 8), 2), ((4, 8, 5), 0), ((4, 8, 5), 5)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...], n_global: int) -> None:
    with pytest.raises(InputError, match="LeJEPA got"):
        lejepa(torch.zeros(shape), n_global, 0, CONFIG)


@pytest.mark.parametrize(
    "change",
    [{"weight": -1.0}, {"weight": float("nan")}, {"n_knots": 4}, {"n_knots": 1}, {"n_directions": 0}, {"t_max": 0.0}],
)  # fmt: skip
def test_config_refuses_values_outside_their_range(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(CONFIG, **change)  # type: ignore[arg-type]


def test_weights_of_the_papers_runs() -> None:
    assert weight_of_lambda(0.02, views=8, batch_per_gpu=256) == pytest.approx(40.96)
    assert weight_of_lambda(0.02, views=8, batch_per_gpu=128) == pytest.approx(20.48)
    assert weight_of_lambda(0.02, views=8, batch_per_gpu=128, processes=16) == pytest.approx(16 * 20.48)


def test_next_token_mean_is_per_token() -> None:
    assert next_token(torch.tensor(12.0), 8) == 1.5


def tiny(**change: object) -> TextEncoder:
    torch.manual_seed(0)
    config = replace(SIZES["tiny"], vocab_size=50, max_tokens=16, dropout=0.0, **change)  # type: ignore[arg-type]
    return TextEncoder(config)


def captions(count: int) -> Ragged:
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (count,), generator=draws).tolist()
    return Ragged.from_rows([torch.randint(5, 50, (n,), generator=draws).tolist() for n in lengths])


def test_lejepa_model_reads_its_batch_view_major() -> None:
    model = LejepaModel(tiny(), replace(CONFIG, n_directions=16), n_views=4, n_global=2).eval()
    batch = model.encoder.batch(captions(12))
    z = model.encoder.project(model.encoder.pooled(batch))
    by_view = torch.stack([z[0:3], z[3:6], z[6:9], z[9:12]])
    assert torch.equal(model(batch, 9).loss, lejepa(by_view, 2, 9, model.config).loss)
    with pytest.raises(InputError, match="10 sequences does not divide"):
        model(model.encoder.batch(captions(10)), 0)
    with pytest.raises(ConfigError, match="5 of 4 views"):
        LejepaModel(model.encoder, CONFIG, n_views=4, n_global=5)


def test_a_few_steps_lower_either_loss() -> None:
    jepa = LejepaModel(tiny(), replace(CONFIG, weight=10.0, n_directions=32), n_views=4, n_global=2)
    language = NextTokenModel(tiny(causal=True, projector=None))
    for model, rows in ((jepa, captions(32)), (language, captions(16))):
        batch = model.encoder.batch(rows)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(15):
            loss = model(batch, 0).loss if isinstance(model, LejepaModel) else model(batch)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]


def test_every_parameter_of_either_model_gets_a_gradient() -> None:
    """DistributedDataParallel stops at the first that does not."""
    jepa = LejepaModel(tiny(), replace(CONFIG, n_directions=8), n_views=2, n_global=1)
    torch.autograd.backward(jepa(jepa.encoder.batch(captions(8)), 0).loss)
    language = NextTokenModel(tiny(causal=True, projector=None))
    torch.autograd.backward(language(language.encoder.batch(captions(8))))
    for model in (jepa, language):
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert missing == []
