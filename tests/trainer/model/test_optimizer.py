"""`trainer.model.optimizer`: the schedule by its formula, who decays, and that a bad gradient is not applied."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from trainer.model.optimizer import OptimizerConfig, build_optimizer, learning_rate, take_step

CONFIG = OptimizerConfig(lr=1e-3)


def test_the_rate_rises_from_one_percent_to_the_peak_and_ends_at_its_share() -> None:
    rates = [learning_rate(CONFIG, step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[5] == pytest.approx(1e-3 * (0.01 + 0.99 * 0.5))
    assert rates[10] == pytest.approx(1e-3) == max(rates)
    assert rates[-1] == pytest.approx(1e-6)


@given(st.integers(1, 500), st.floats(0, 0.9), st.floats(0, 1))
def test_the_rate_never_leaves_its_bounds_and_falls_after_warm_up(total: int, warmup: float, final: float) -> None:
    config = OptimizerConfig(lr=1.0, warmup_share=warmup, final_share=final)
    rates = [learning_rate(config, step, total) for step in range(total)]
    assert all(min(0.01, final) <= rate <= 1.0 + 1e-12 for rate in rates)
    after = rates[round(warmup * total) :]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = build_optimizer(CONFIG, model).param_groups
    assert [[tuple(p.shape) for p in g["params"]] for g in groups] == [[(4, 3)], [(4,), (4,), (4,)]]
    assert [g["weight_decay"] for g in groups] == [0.05, 0.0]


def test_frozen_parameters_are_not_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    assert sum(len(g["params"]) for g in build_optimizer(CONFIG, model).param_groups) == 2


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = build_optimizer(CONFIG, model)
    model.weight.grad = torch.full((1, 4), 10.0)
    norm = take_step(optimizer, CONFIG, 0, 10)
    assert float(norm) == pytest.approx(20.0)
    assert optimizer.state[model.weight]["exp_avg"].norm() == pytest.approx(0.1, rel=1e-4)
    assert model.weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(value: float) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = build_optimizer(CONFIG, model)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((1, 4), value)
    assert not math.isfinite(float(take_step(optimizer, CONFIG, 5, 10)))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"weight_decay": -1.0}, {"warmup_share": 1.0}, {"clip_norm": 0.0}])
def test_a_value_out_of_range_is_refused_by_its_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.*{next(iter(wrong))}"):
        OptimizerConfig(**{"lr": 1e-3, **wrong})  # type: ignore[arg-type]
