"""`trainer.theory.finite_world`: laws of pairs, closed-form encoders against known values, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from infra.errors import InputError
from trainer.theory import finite_world
from trainer.theory.finite_world import PairLaw

TINY = 1e-12


def ring(states: int, *, stay: float = 0.5) -> PairLaw:
    """Uniform states on a ring; the other view stays or moves to a neighbour.

    Values: stay + (1 - stay) cos(2 pi i / n).
    """
    step = np.roll(np.eye(states), 1, axis=1)
    return PairLaw((stay * np.eye(states) + (1 - stay) / 2 * (step + step.T)) / states)


def random_law(seed: int, states: int = 12) -> PairLaw:
    return finite_world.random_world(np.random.default_rng(seed), states=states, scenes=states, bandwidth=0.5)


@pytest.mark.parametrize(
    ("joint", "said"),
    [
        ([[0.5, 0.5]], "square"),
        ([[0.5, float("nan")], [0.25, 0.25]], "square of finite"),
        ([[0.7, -0.1], [-0.1, 0.5]], "nonnegative"),
        ([[0.5, 0.0], [0.0, 0.6]], "sum 1"),
        ([[0.4, 0.3], [0.1, 0.2]], "symmetric"),
        ([[1.0, 0.0], [0.0, 0.0]], "never occurs"),
    ],
)
def test_what_is_no_law_of_pairs_is_refused(joint: list[list[float]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PairLaw(np.array(joint))


def test_two_states_have_the_value_known_by_hand() -> None:
    law = PairLaw(np.array([[0.4, 0.1], [0.1, 0.4]]))
    assert law.values == pytest.approx([0.6], abs=TINY)
    f_XK = finite_world.whitening_jepa(law, 1)
    assert np.abs(f_XK) == pytest.approx(np.ones((2, 1)), abs=TINY)
    assert finite_world.jepa_loss(law, f_XK) == pytest.approx(0.8, abs=TINY)


def test_a_ring_has_the_values_of_its_waves() -> None:
    wanted = sorted((0.5 + 0.5 * np.cos(2 * np.pi * np.arange(1, 7) / 7)), reverse=True)
    assert ring(7).values == pytest.approx(wanted, abs=TINY)


def test_eigenfunctions_are_whitened_and_without_the_constant() -> None:
    law = random_law(0)
    values, functions_XK = finite_world.spectrum(law)
    p_X = law.marginal_X
    assert functions_XK.shape == (12, 11)
    assert p_X @ functions_XK == pytest.approx(np.zeros(11), abs=1e-10)
    assert finite_world.covariance(p_X, functions_XK) == pytest.approx(np.eye(11), abs=1e-10)
    predicted_XK = law.joint_XX @ functions_XK / p_X[:, None]
    assert predicted_XK == pytest.approx(functions_XK * values, abs=1e-10)


def test_the_constant_is_left_out_where_other_values_are_1_too() -> None:
    """Two worlds side by side that never meet: the value 1 has two eigenfunctions, of which one is the constant."""
    half = random_law(3, 5).joint_XX
    joint = np.zeros((10, 10))
    joint[:5, :5] = joint[5:, 5:] = half / 2
    (f_XK,) = finite_world.whitening_jepa(PairLaw(joint), 1).T
    assert f_XK == pytest.approx(np.sign(f_XK[0]) * np.repeat([1.0, -1.0], 5), abs=1e-10)


def test_a_law_by_scenes_is_positive_and_a_bipartite_one_is_not() -> None:
    assert random_law(1).is_positive
    assert not ring(6, stay=0.0).is_positive
    assert finite_world.kept_nuisance(np.array([0.5, 0.3, 0.2]), 0.3).is_positive


def test_a_kept_nuisance_has_its_strength_as_its_values() -> None:
    weights_U = np.array([0.5, 0.3, 0.15, 0.05])
    assert finite_world.kept_nuisance(weights_U, 0.35).values == pytest.approx([0.35] * 3, abs=TINY)
    assert finite_world.fresh_nuisance(weights_U).values == pytest.approx([0.0] * 3, abs=TINY)


def test_the_law_of_observations_is_that_of_drawing_them() -> None:
    """The pushed-forward law against counts of a simulation of bad views, through a shuffled rendering."""
    rng = np.random.default_rng(5)
    weights_S, states_SZ = np.array([0.6, 0.4]), np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    weights_U, beta, n = np.array([0.75, 0.25]), 0.4, 400_000
    modality = finite_world.random_modality(
        rng, finite_world.pairs_of_scenes(weights_S, states_SZ), finite_world.kept_nuisance(weights_U, beta)
    )
    scenes = rng.choice(2, n, p=weights_S)
    z = [(rng.random(n)[:, None] > states_SZ.cumsum(1)[scenes]).sum(1) for _ in range(2)]
    u = rng.choice(2, (2, n), p=weights_U)
    u[1] = np.where(rng.random(n) < beta, u[0], u[1])
    x = [modality.image_ZU[z[i], u[i]] for i in range(2)]
    counts_XX = np.zeros((6, 6))
    np.add.at(counts_XX, (x[0], x[1]), 1 / n)
    assert counts_XX == pytest.approx(modality.pairs.joint_XX, abs=4e-3)


def test_whitening_turns_any_encoder_of_full_rank_and_refuses_a_collapsed_one() -> None:
    law = random_law(2)
    f_XK = np.random.default_rng(0).normal(size=(12, 3)) * [1, 10, 0.1] + 5
    white_XK = finite_world.whitened(law.marginal_X, f_XK)
    assert finite_world.covariance(law.marginal_X, white_XK) == pytest.approx(np.eye(3), abs=1e-10)
    assert finite_world.principal_angles(law.marginal_X, f_XK, white_XK) == pytest.approx(np.zeros(3), abs=1e-6)
    f_XK[:, 2] = f_XK[:, 0] + f_XK[:, 1]
    with pytest.raises(InputError, match="collapsed"):
        finite_world.whitened(law.marginal_X, f_XK)


def test_principal_angles_are_those_that_were_made() -> None:
    law = random_law(4)
    functions_XK = finite_world.spectrum(law)[1]
    turned_XK = functions_XK[:, :2].copy()
    turned_XK[:, 1] = np.cos(0.3) * functions_XK[:, 1] + np.sin(0.3) * functions_XK[:, 5]
    angles = finite_world.principal_angles(law.marginal_X, functions_XK[:, :2], turned_XK)
    assert angles == pytest.approx([0, np.degrees(0.3)], abs=1e-5)


@pytest.mark.parametrize("dims", [0, 12])
def test_more_dimensions_than_there_are_functions_are_refused(dims: int) -> None:
    with pytest.raises(InputError, match="1 to 11"):
        finite_world.whitening_jepa(random_law(0), dims)
