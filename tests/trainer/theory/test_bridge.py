"""`trainer.theory.bridge`: what is drawn, what the control learns, and how a known encoder is judged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from infra.errors import ConfigError, InputError
from trainer.model import objectives
from trainer.theory import bridge, finite_world
from trainer.theory.bridge import BridgeConfig
from trainer.theory.finite_world import F64, PairLaw

# Eight states in four groups, two by two: three strong eigenfunctions, far above the rest.
GROUPS = finite_world.pairs_of_scenes(np.array([0.3, 0.3, 0.2, 0.2]), 0.42 * np.repeat(np.eye(4), 2, axis=1) + 0.02)
SMALL = BridgeConfig(dims=3, seeds=1, steps=300, batch=256, n_directions=8, hidden=16)


def angles(law: PairLaw, f_XK: F64) -> F64:
    return finite_world.principal_angles(law.marginal_X, finite_world.whitening_jepa(law, f_XK.shape[1]), f_XK)


def test_the_control_learns_the_closed_form_from_pairs_alone() -> None:
    assert GROUPS.values[2] - GROUPS.values[3] > 0.5
    before = angles(GROUPS, bridge.train(GROUPS, dataclasses.replace(SMALL, steps=1), None, 0))
    after = angles(GROUPS, bridge.train(GROUPS, SMALL, None, 0))
    assert before[-1] > 30
    assert after[-1] < 8


def test_sigreg_of_a_small_weight_stays_nearer_to_the_closed_form_than_of_a_large_one() -> None:
    law = bridge.modalities(SMALL, "good")[0].pairs
    small, large = (float(angles(law, bridge.train(law, SMALL, weight, 0)).mean()) for weight in (1.0, 64.0))
    assert small + 10 < large


def test_the_same_seed_gives_the_same_encoder_and_another_another() -> None:
    law, few = GROUPS, dataclasses.replace(SMALL, steps=20)
    torch.manual_seed(1)
    first = bridge.train(law, few, 4.0, 7)
    torch.manual_seed(2)
    assert np.array_equal(bridge.train(law, few, 4.0, 7), first)
    assert not np.array_equal(bridge.train(law, few, 4.0, 8), first)


def test_the_loss_is_the_trainers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its distance of two views is the JEPA loss of the theorems over 4 K."""
    called = []

    def spy(z_VBK: torch.Tensor, n_global: int, step: int, config: objectives.LejepaConfig) -> objectives.LejepaTerms:
        called.append((tuple(z_VBK.shape), n_global, step, config.weight))
        return objectives.lejepa(z_VBK, n_global, step, config)

    monkeypatch.setattr(bridge, "lejepa", spy)
    bridge.train(GROUPS, dataclasses.replace(SMALL, steps=2), 4.0, 0)
    assert called == [((2, 256, 3), 2, 0, 4.0), ((2, 256, 3), 2, 1, 4.0)]
    f_XK = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 3)))
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6)).T
    uniform = PairLaw(np.full((6, 6), 1 / 36))
    inv = objectives.lejepa(f_XK[pairs], 2, 0, objectives.LejepaConfig(weight=1.0, n_directions=2)).inv
    assert float(inv) == pytest.approx(finite_world.jepa_loss(uniform, f_XK.numpy()) / 12)


def test_the_whitening_penalty_is_0_on_average_for_a_whitened_encoder_whatever_its_tails() -> None:
    """A function that is large on a rare state; there the square over one batch has a mean of 19 / 128 x 4 = .6."""
    rng, rare, trials = np.random.default_rng(0), 0.05, 2000
    values = torch.tensor([-np.sqrt(rare / (1 - rare)), np.sqrt((1 - rare) / rare)])
    found, plain = [], []
    for _ in range(trials):
        z_B = values[torch.from_numpy((rng.random(128) < rare).astype(np.int64))]
        found.append(float(bridge.whitening_loss(z_B[None, :, None].expand(2, -1, -1))))
        plain.append(float(4 * (z_B.square().mean() - 1).square()))
    error = np.std(found) / np.sqrt(trials)
    assert abs(np.mean(found)) < 4 * error < 0.2
    assert np.mean(plain) == pytest.approx(0.55, abs=0.1)


def test_pairs_are_judged_by_both_modalities_and_the_closed_form_of_the_bad_arm_loses_two() -> None:
    one = bridge.train_both(dataclasses.replace(SMALL, dims=4, steps=60), "bad", None, 0)
    assert (len(one.angles), len(one.shares)) == (4, 8)
    assert one.exact_error == pytest.approx(4, abs=1e-10)
    assert one.excess >= -1e-12 and list(one.angles) == sorted(one.angles)
    assert one.kind == "bad: whitening"


def test_shares_of_the_closed_form_are_1_for_its_functions_and_0_for_the_others() -> None:
    law = bridge.modalities(BridgeConfig(), "bad")[0].pairs
    assert law.values[2] == pytest.approx(law.values[3], abs=1e-12), "the two directions of the nuisance"
    best_XK = finite_world.whitening_jepa(law, 4)
    turned_XK = best_XK @ np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    assert bridge._shares(law, turned_XK) == pytest.approx([1] * 4 + [0] * 4, abs=1e-10)


def test_a_collapsed_encoder_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "train", lambda law, config, weight, seed: np.ones((len(law.marginal_X), 4)))
    with pytest.raises(InputError, match="collapsed"):
        bridge.train_both(BridgeConfig(), "good", 1.0, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"dims": 2}, "dims is 2"),
        ({"weights": ()}, "weights are"),
        ({"weights": (1.0, -1.0)}, "weights are"),
    ],
)
def test_settings_without_a_meaning_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BridgeConfig(**change)  # type: ignore[arg-type]
