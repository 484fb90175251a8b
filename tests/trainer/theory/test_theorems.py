"""Each proposition on random worlds; `test_theorems_broken` breaks their assumptions, one at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.trainer import worlds
from tests.trainer.worlds import TINY, aimed, by_itself, encoded, gap, random_nuisance, random_world, rotation
from trainer.theory import finite_world, theorems

law_settings = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
dimensions = st.integers(1, 5)


# --- Theorem 1: same positives, one rotation ----------------------------------------------------------------------


@law_settings
@given(seeds, dimensions)
def test_theorem_1_good_views_of_one_world_agree_up_to_a_rotation(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    assume(gap(world, dims) > 1e-5)
    sizes = rng.integers(2, 6, 2)
    modalities = [
        finite_world.random_modality(rng, world, finite_world.fresh_nuisance(rng.dirichlet(np.ones(n)))) for n in sizes
    ]
    shown = [encoded(modality, dims) for modality in modalities]
    assert abs(finite_world.alignment_error(*shown)) <= TINY
    # f_m(g_m(z, u)) = h*(z) Q_m, point by point.
    truth_ZK = finite_world.whitening_jepa(world, dims)
    for modality in modalities:
        f_ZUK = modality.by_state(finite_world.whitening_jepa(modality.pairs, dims))
        q_KK = worlds.rotation_from_pairs(f_ZUK[:, 0], truth_ZK)
        assert np.abs(f_ZUK - (truth_ZK @ q_KK)[:, None]).max() <= 1e-12 / gap(world, dims) / world.marginal_X.min()


# --- Proposition 1: the spectral embedding ------------------------------------------------------------------------


@law_settings
@given(seeds, dimensions)
def test_proposition_1_no_whitened_encoder_has_a_smaller_loss_than_the_spectral_embedding(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    best = finite_world.jepa_loss(world, finite_world.whitening_jepa(world, dims))
    assert best == pytest.approx(2 * (1 - world.values[:dims]).sum(), abs=1e-12)
    truth_ZK = finite_world.whitening_jepa(world, dims)
    # From far away to very near, where a wrong optimum would show.
    for size in (1e3, 1.0, 1e-1, 1e-3):
        near_ZK = truth_ZK + size * rng.normal(size=(14, dims))
        other = finite_world.jepa_loss(world, finite_world.whitened(world.marginal_X, near_ZK))
        assert other >= best - TINY


@law_settings
@given(seeds, dimensions)
def test_proposition_1_under_a_gap_every_optimum_is_a_rotation_of_it(seed: int, dims: int) -> None:
    """An encoder whose loss is the least up to e is within e / gap of a rotation."""
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    assume(gap(world, dims) > 1e-5)
    truth_ZK = finite_world.whitening_jepa(world, dims)
    for size in (0.0, 1e-4, 1e-2, 0.3):
        turned_ZK = truth_ZK @ rotation(rng, dims) + size * rng.normal(size=(14, dims))
        other_ZK = finite_world.whitened(world.marginal_X, turned_ZK)
        excess = finite_world.jepa_loss(world, other_ZK) - finite_world.jepa_loss(world, truth_ZK)
        error = finite_world.alignment_error(by_itself(world, truth_ZK), by_itself(world, other_ZK))
        assert error <= excess / gap(world, dims) + 1e-10


# --- Proposition 2: pairs find the rotation, unpaired moments do not ----------------------------------------------


@law_settings
@given(seeds, dimensions)
def test_proposition_2_k_well_placed_pairs_find_the_rotation(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    f_ZK = finite_world.whitening_jepa(random_world(rng), dims)
    q_KK = rotation(rng, dims)
    pairs = worlds.well_placed(f_ZK)
    assert len(set(pairs.tolist())) == dims
    found_KK = worlds.rotation_from_pairs(f_ZK[pairs] @ q_KK, f_ZK[pairs])
    condition = np.linalg.cond(f_ZK[pairs])
    assert np.abs(found_KK - q_KK).max() <= 1e-14 * (1 + condition**2)


@law_settings
@given(seeds, dimensions)
def test_proposition_2_unpaired_second_moments_are_the_same_for_every_rotation(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    f_ZK = finite_world.whitening_jepa(world, dims)
    g_ZK = f_ZK @ rotation(rng, dims)
    p_Z = world.marginal_X
    assert p_Z @ f_ZK == pytest.approx(p_Z @ g_ZK, abs=1e-10)
    moments = [finite_world.covariance(p_Z, encoder_ZK) for encoder_ZK in (f_ZK, g_ZK)]
    assert moments[0] == pytest.approx(moments[1], abs=1e-10)
    assert moments[0] == pytest.approx(np.eye(dims), abs=1e-10)


# --- Theorem 3: nuisance bounds the error from below --------------------------------------------------------------


@law_settings
@given(seeds, dimensions)
def test_theorem_3_encoders_that_keep_nuisance_are_at_least_so_far_apart(seed: int, dims: int) -> None:
    """Any whitened encoders of two modalities with nuisances of their own: random ones, and noisy closed forms."""
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    modalities = [finite_world.random_modality(rng, world, random_nuisance(rng)) for _ in range(2)]
    for size in (0.0, 0.1, 1.0, 100.0):
        shown = []
        for modality in modalities:
            f_XK = finite_world.whitening_jepa(modality.pairs, dims)
            f_XK = f_XK + size * rng.normal(size=f_XK.shape)
            shown.append(finite_world.shown(modality, finite_world.whitened(modality.pairs.marginal_X, f_XK)))
        lost = [one.lost for one in shown]
        error = finite_world.alignment_error(*shown)
        assert error >= theorems.least_error(dims, *lost) - TINY
        assert theorems.least_error(dims, *lost) >= sum(lost) - TINY


# --- Proposition 3: the threshold ---------------------------------------------------------------------------------


@law_settings
@given(seeds, dimensions)
def test_proposition_3_nuisance_takes_directions_from_the_threshold_on(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    modalities = [finite_world.random_modality(rng, world, random_nuisance(rng)) for _ in range(2)]
    assume(gap(world, dims) > 1e-5)
    counts = []
    for modality in modalities:
        limit = theorems.threshold(world, modality.nuisance, dims)
        assume(abs(limit.beta - limit.alpha) > 1e-5)
        counts.append(theorems.count_lost(world, modality.nuisance, dims))
        assert (counts[-1] == 0) is limit.is_below
        assert (counts[-1] >= 1) is (limit.beta > limit.alpha)
    assume(all(gap(world, dims - r) > 1e-5 for r in counts if 0 < r < dims))
    shown = [encoded(modality, dims) for modality in modalities]
    assert [one.lost for one in shown] == pytest.approx(counts, abs=1e-10)
    assert finite_world.alignment_error(*shown) == pytest.approx(2 * max(counts), abs=1e-10)


def test_sorting_and_dropping_the_first_miscounts_where_all_nuisance_is_kept() -> None:
    rng = np.random.default_rng(6)
    world = random_world(rng)
    nuisance = finite_world.kept_nuisance(rng.dirichlet(np.ones(5)), 1.0)
    modality = finite_world.random_modality(rng, world, nuisance)
    assert theorems.count_lost(world, nuisance, 4) == 4
    assert encoded(modality, 4).lost == pytest.approx(4, abs=TINY)
    assert theorems.count_lost_naively(world, nuisance, 4) == 3
    values, vectors = np.linalg.eigh(modality.pairs.kernel_XX)
    naive_XK = vectors[:, ::-1][:, 1:5] / np.sqrt(modality.pairs.marginal_X)[:, None]
    assert values[-5:] == pytest.approx(np.ones(5), abs=TINY)
    shown = finite_world.shown(modality, naive_XK)
    # The constant is among the four, as far as it is not the one that was dropped.
    centre = modality.pairs.marginal_X @ naive_XK
    assert 3 <= shown.lost + 1e-9 and shown.lost == pytest.approx(4 - np.square(centre).sum(), abs=1e-9)
    assert np.square(centre).sum() > 1e-3


@law_settings
@given(seeds, dimensions, st.floats(0, 0.99))
def test_below_1_both_ways_of_counting_agree(seed: int, dims: int, beta: float) -> None:
    rng = np.random.default_rng(seed)
    world, nuisance = random_world(rng), finite_world.kept_nuisance(rng.dirichlet(np.ones(4)), beta)
    assume(np.abs(world.values - beta).min() > 1e-6 and world.values[0] < 1 - 1e-6)
    assert theorems.count_lost(world, nuisance, dims) == theorems.count_lost_naively(world, nuisance, dims)


# --- other positives: the mismatch bound --------------------------------------------------------------------------


@law_settings
@given(seeds, dimensions, st.floats(1e-4, 1.0))
def test_the_mismatch_bounds_hold(seed: int, dims: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    other = theorems.mixed_pairing(world, rng.dirichlet(np.full(14, 0.2), 14), share)
    encoders = [by_itself(law, finite_world.whitening_jepa(law, dims)) for law in (world, other)]
    error, bounds = finite_world.alignment_error(*encoders), theorems.mismatch_bounds(world, other, dims)
    assert error <= min(bounds.by_both, bounds.by_one) + TINY


@law_settings
@given(seeds, dimensions, st.floats(1e-3, 1.0))
def test_the_mismatch_bound_is_within_a_factor_of_8_of_an_aimed_change(seed: int, dims: int, size: float) -> None:
    """A change that turns the last function kept into the first one left out is the worst for its size."""
    world, other = aimed(np.random.default_rng(seed), dims, size)
    encoders = [by_itself(law, finite_world.whitening_jepa(law, dims)) for law in (world, other)]
    error, bounds = finite_world.alignment_error(*encoders), theorems.mismatch_bounds(world, other, dims)
    assume(1e-8 < bounds.by_both < 0.1)
    assert bounds.by_both / 8 <= error <= bounds.by_both


# --- Proposition 4: the softmax loss ------------------------------------------------------------------------------


@law_settings
@given(seeds, st.integers(1, 6), st.integers(2, 9), st.sampled_from([1e-3, 1.0, 30.0]))
@example(0, 4, 5, 300.0)
def test_proposition_4_cross_entropy_is_a_pull_and_a_log_partition(
    seed: int, dims: int, words: int, size: float
) -> None:
    """Against torch's own cross-entropy, also where exp would overflow; and the pull is a distance less two norms."""
    import torch

    rng = np.random.default_rng(seed)
    h_NK, e_VK, y_N = size * rng.normal(size=(7, dims)), rng.normal(size=(words, dims)), rng.integers(0, words, 7)
    split = worlds.softmax_split(h_NK, e_VK, y_N)
    wanted = torch.nn.functional.cross_entropy(
        torch.from_numpy(h_NK) @ torch.from_numpy(e_VK).T, torch.from_numpy(y_N), reduction="none"
    )
    scale = 1 + np.abs(split.log_partition_N).max()
    assert split.pull_N + split.log_partition_N == pytest.approx(wanted.numpy(), abs=1e-13 * scale)
    e_NK = e_VK[y_N]
    distance_N = np.square(h_NK - e_NK).sum(1) - np.square(h_NK).sum(1) - np.square(e_NK).sum(1)
    assert split.pull_N == pytest.approx(distance_N / 2, abs=1e-13 * (1 + np.square(h_NK).sum(1).max()))


def test_proposition_4_it_is_the_loss_of_our_next_token_encoder() -> None:
    """Hidden states of the trainer's encoder as prefixes, its embedding as table: the split is its training loss."""
    import torch

    from trainer.data.ragged import Ragged
    from trainer.model.encoder import SIZES, TextEncoder, TokenBatch

    torch.manual_seed(0)
    small = dataclasses.replace(SIZES["tiny"], width=16, heads=2, ffn=24, vocab_size=40, max_tokens=8, dropout=0.0)
    encoder = TextEncoder(dataclasses.replace(small, causal=True, projector=None)).double()
    batch = TokenBatch.from_ragged(Ragged.from_rows([[3, 9, 4, 30], [7, 7, 1], [12, 39]]))
    with torch.no_grad():
        loss, tokens = encoder.next_token_loss(batch)
        prefixes_NK = encoder.hidden(batch)[batch.followed_M].numpy()
    table_VK = encoder.bert.embeddings.word_embeddings.weight.detach().numpy()
    split = worlds.softmax_split(prefixes_NK, table_VK, batch.ids_T[batch.followed_M + 1].numpy())
    assert (tokens, len(split.pull_N)) == (6, 6)
    assert float((split.pull_N + split.log_partition_N).sum()) == pytest.approx(float(loss), abs=1e-10)
