"""Each theorem with one of its assumptions broken, and the claim seen to fail: what the assumption is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import qr

from infra.errors import InputError
from tests.trainer import worlds
from tests.trainer.worlds import TINY, by_itself, encoded, gap, random_world, waves
from trainer.theory import finite_world, theorems
from trainer.theory.finite_world import Modality, PairLaw, Shown

law_settings = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def test_theorem_1_fails_for_a_rendering_that_is_not_injective() -> None:
    rng = np.random.default_rng(1)
    world, nuisance = random_world(rng), finite_world.fresh_nuisance(np.array([0.6, 0.4]))
    image_ZU = rng.permutation(28).reshape(14, 2)
    image_ZU[image_ZU == 27] = image_ZU[0, 0] if image_ZU[0, 0] != 27 else image_ZU[1, 0]
    with pytest.raises(InputError, match="27 observations"):
        Modality(world=world, nuisance=nuisance, image_ZU=image_ZU)
    merged = finite_world.push_forward(world, nuisance, image_ZU)
    f_ZUK = finite_world.whitening_jepa(merged, 4)[image_ZU]
    mean_ZK = np.einsum("u,zuk->zk", nuisance.marginal_X, f_ZUK)
    square = float(np.einsum("z,u,zuk->", world.marginal_X, nuisance.marginal_X, np.square(f_ZUK)))
    whole = encoded(finite_world.random_modality(rng, world, nuisance), 4)
    assert finite_world.alignment_error(whole, Shown(world.marginal_X, mean_ZK, square)) > 1e-3


def test_theorem_1_fails_for_other_positives() -> None:
    rng = np.random.default_rng(2)
    world = random_world(rng)
    other = theorems.mixed_pairing(world, rng.dirichlet(np.full(14, 0.1), 14), 0.3)
    assert other.marginal_X == pytest.approx(world.marginal_X, abs=TINY)
    encoders = [by_itself(law, finite_world.whitening_jepa(law, 4)) for law in (world, other)]
    assert finite_world.alignment_error(*encoders) > 1e-3


def test_proposition_1_fails_without_a_gap() -> None:
    world = waves()
    assert gap(world, 1) == pytest.approx(0, abs=TINY)
    angle_Z = 2 * np.pi * np.arange(8) / 8
    optima = [by_itself(world, np.sqrt(2) * wave(angle_Z)[:, None]) for wave in (np.cos, np.sin)]
    losses = [finite_world.jepa_loss(world, one.mean_ZK) for one in optima]
    assert losses == pytest.approx([2 * (1 - world.values[0])] * 2, abs=TINY)
    assert finite_world.alignment_error(*optima) == pytest.approx(2, abs=TINY)


@law_settings
@given(seeds, st.integers(2, 5))
def test_proposition_2_fails_with_one_pair_fewer(seed: int, dims: int) -> None:
    """Two rotations fit k - 1 pairs equally well and differ by a reflection, an error of 4."""
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    f_ZK = finite_world.whitening_jepa(world, dims)
    pairs = worlds.well_placed(f_ZK)[1:]
    free_K = qr(f_ZK[pairs].T, mode="full")[0][:, -1]
    mirror_KK = np.eye(dims) - 2 * np.outer(free_K, free_K)
    assert f_ZK[pairs] @ mirror_KK == pytest.approx(f_ZK[pairs], abs=1e-10)
    apart = world.marginal_X @ np.square(f_ZK @ mirror_KK - f_ZK).sum(1)
    assert apart == pytest.approx(4, abs=1e-10)


def test_theorem_3_fails_when_both_modalities_bear_one_nuisance() -> None:
    """Encoders of nothing but a shared nuisance agree, though every direction is lost."""
    rng = np.random.default_rng(4)
    world, weights_U = random_world(rng), np.array([0.5, 0.3, 0.2])
    modality = finite_world.random_modality(rng, world, finite_world.kept_nuisance(weights_U, 1.0))
    f_XK = finite_world.whitening_jepa(modality.pairs, 2)
    lost = finite_world.shown(modality, f_XK).lost
    assert lost == pytest.approx(2, abs=TINY)
    shared = Shown(modality.pairs.marginal_X, f_XK, 2.0)
    assert finite_world.alignment_error(shared, shared) == pytest.approx(0, abs=TINY)
    assert theorems.least_error(2, lost, lost) == pytest.approx(4, abs=TINY)


def test_proposition_3_fails_for_kernels_that_are_not_positive() -> None:
    """Two views that always differ, in state and in nuisance: beta_1 < alpha_1 < 0, and their product is above both."""
    world, nuisance = (PairLaw((np.ones((n, n)) - np.eye(n)) / (n * (n - 1))) for n in (4, 3))
    assert (world.values[0], nuisance.values[0]) == pytest.approx((-1 / 3, -1 / 2), abs=TINY)
    modality = Modality(world=world, nuisance=nuisance, image_ZU=np.arange(12).reshape(4, 3))
    with pytest.raises(InputError, match="says nothing"):
        theorems.threshold(world, nuisance, 1)
    assert nuisance.values[0] < world.values[0], "below the threshold, were there one"
    assert theorems.count_lost(world, nuisance, 1) == 1
    assert encoded(modality, 1).lost == pytest.approx(1, abs=TINY)


def test_the_mismatch_bound_says_nothing_without_a_gap_and_refuses_other_marginals() -> None:
    ring, rng = waves(), np.random.default_rng(7)
    bounds = theorems.mismatch_bounds(ring, ring, 2)
    assert (bounds.by_both, bounds.by_one) == (0.0, 0.0)
    turned = PairLaw(np.full((8, 8), 1 / 64))
    assert theorems.mismatch_bounds(turned, ring, 1).by_both == np.inf
    with pytest.raises(InputError, match="marginals"):
        theorems.mismatch_bounds(random_world(rng, 8), random_world(rng, 8), 2)


def test_without_a_gap_a_small_change_of_positives_turns_the_encoder_right_round() -> None:
    """What the gap is for: a change of size 1e-6 in a kernel without one moves the encoder by an error of 2."""
    # Half of the pairs at random, so that no probability is near 0.
    joint_ZZ, angle_Z = (waves().joint_XX + 1 / 64) / 2, 2 * np.pi * np.arange(8) / 8
    changed = []
    for wave in (np.cos, np.sin):
        f_Z = np.sqrt(2) * wave(angle_Z)
        changed.append(PairLaw(joint_ZZ + 1e-6 * np.outer(f_Z, f_Z) / 64))
    encoders = [by_itself(law, finite_world.whitening_jepa(law, 1)) for law in changed]
    assert np.abs(changed[0].kernel_XX - changed[1].kernel_XX).max() < 1e-6
    assert finite_world.alignment_error(*encoders) == pytest.approx(2, abs=1e-6)


def test_proposition_4_without_the_log_partition_nothing_keeps_the_scale() -> None:
    """The pull alone falls without end as vectors grow; the whole loss never falls below 0."""
    rng = np.random.default_rng(8)
    h_NK, e_VK = rng.normal(size=(20, 3)), rng.normal(size=(6, 3))
    y_N = (h_NK @ e_VK.T).argmax(1)
    splits = [worlds.softmax_split(size * h_NK, e_VK, y_N) for size in (1.0, 1e3, 1e6)]
    pulls = [float(split.pull_N.mean()) for split in splits]
    assert pulls[0] > 100 * pulls[0] > pulls[1] > pulls[2] and pulls[2] < -1e5
    assert all(float((split.pull_N + split.log_partition_N).min()) >= -1e-9 for split in splits)


def test_proposition_4_fails_with_a_bias() -> None:
    rng = np.random.default_rng(9)
    h_NK, e_VK, bias_V, y_N = rng.normal(size=(5, 3)), rng.normal(size=(4, 3)), rng.normal(size=4), np.arange(5) % 4
    logits_NV = h_NK @ e_VK.T + bias_V
    wanted_N = np.log(np.exp(logits_NV).sum(1)) - logits_NV[np.arange(5), y_N]
    split = worlds.softmax_split(h_NK, e_VK, y_N)
    assert np.abs(split.pull_N + split.log_partition_N - wanted_N).max() > 0.01
