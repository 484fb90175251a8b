"""A scene's vector is the mean of its unit captions, by the rule that every mean of unit rows follows."""

from __future__ import annotations

import numpy as np

from infra.vectors import mean_of_unit_rows
from pipelines.embed.worker import scene_means


def test_captions_that_cancel_give_a_zero_vector_and_no_direction_of_rounding() -> None:
    v = np.random.Generator(np.random.PCG64(0)).standard_normal(8)
    captions = np.stack([v, -v * (1 + 1e-7), v, 3 * v]).astype(np.float32)
    means = scene_means([(np.arange(4), {2: captions})], np.array([0, 0, 1, 1]), shape=(2, 8))
    assert not means[2][0].any()
    np.testing.assert_allclose(means[2][1], v / np.linalg.norm(v), atol=1e-6)


def test_batches_in_any_order_give_the_means_of_rows_in_order() -> None:
    rows = np.random.Generator(np.random.PCG64(1)).standard_normal((30, 8)).astype(np.float32)
    starts = np.array([0, 4, 5, 20])
    scene_N = np.searchsorted(starts, np.arange(30), side="right") - 1
    order = np.random.Generator(np.random.PCG64(2)).permutation(30)
    batches = [(places, {0: rows[places]}) for places in np.array_split(order, 7)]
    means = scene_means(batches, scene_N, shape=(4, 8))
    np.testing.assert_allclose(means[0], mean_of_unit_rows(rows, starts), atol=1e-6)
