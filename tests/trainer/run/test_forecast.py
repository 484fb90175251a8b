"""`trainer.run.forecast`: arithmetic agrees with the built model, and the numbers of `--plan` with what a run does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from infra.errors import ConfigError, InputError
from infra.home import Home
from tests.trainer import training
from trainer.data.ragged import Ragged
from trainer.model.encoder import SIZES, EncoderConfig, TextEncoder
from trainer.run import forecast, recipe, records
from trainer.run.assembly import assemble, build_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return training.make_home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("name", ["33m", "109m", "tiny"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = SIZES[name]
    with torch.device("meta"):
        encoder = TextEncoder(config)
    assert forecast.encoder_parameters(config) == sum(p.numel() for p in encoder.bert.parameters())
    total = sum(p.numel() for p in encoder.parameters())
    assert forecast.encoder_parameters(config) + forecast.projector_parameters(config) == total


def test_operations_are_those_that_torch_counts() -> None:
    """Within 6 %: torch counts attention over padding too, and no element-wise work."""
    config = EncoderConfig(
        layers=2,
        width=64,
        heads=2,
        ffn=256,
        vocab_size=300,
        max_tokens=64,
        dropout=0.0,
        projector=SIZES["tiny"].projector,
    )
    rows = Ragged.from_rows([[5 + i % 40 for i in range(16)]] * 24)
    encoder = TextEncoder(config)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(encoder.project(encoder.pooled(encoder.batch(rows))).square().sum())
    tokens, squares = float(rows.lengths.sum()), float(np.square(rows.lengths.astype(float)).sum())
    assert forecast.train_flops(config, tokens, squares, len(rows)) == pytest.approx(
        counter.get_total_flops(), rel=0.06
    )
    causal = dataclasses.replace(config, causal=True, projector=None)
    head = 3 * 2 * config.vocab_size * config.width * tokens
    body = forecast.train_flops(dataclasses.replace(config, projector=None), tokens, squares, len(rows))
    assert forecast.train_flops(causal, tokens, squares, len(rows)) == pytest.approx(body + head)


def test_kept_bytes_are_those_that_autograd_keeps() -> None:
    config = EncoderConfig(layers=3, width=96, heads=3, ffn=384, vocab_size=300, max_tokens=64, projector=None)
    encoder = TextEncoder(config)
    rows = Ragged.from_rows([[5 + (i * j) % 200 for i in range(8 + j % 9)] for j in range(96)])
    batch = encoder.batch(rows)
    weights = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held, so that no later tensor takes the same place.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        encoder.pooled(batch)
    measured = sum(size for size, _ in kept.values())
    assert forecast.KEPT_BYTES["fp32"] * batch.n_tokens * config.layers * config.width == pytest.approx(
        measured, rel=0.2
    )


def test_a_forecast_counts_what_the_run_then_does(home: Home) -> None:
    chosen = training.small_recipe()
    before = forecast.forecast(chosen, home, ranks=1, on_gpu=False)
    assert (before.facts.steps, before.facts.samples, before.facts.drops_per_epoch) == (
        12,
        192,
        before.facts.scenes - 96,
    )
    assert before.views.source == "estimated" and before.tokenizer_problem is None
    job = training.make_job(home, chosen, "forecast")
    training.train(job)
    after = forecast.forecast(chosen, home, ranks=1, on_gpu=False)
    assert after.views.source == "measured" and after.facts.tokens_from == "cache"
    assert before.views.tokens == pytest.approx(after.views.tokens, rel=0.25)
    assert before.views.squares == pytest.approx(after.views.squares, rel=0.5)
    tokens = records.read_ledger(job.url).column("tokens")[-1].as_py()
    assert after.facts.tokens == pytest.approx(tokens, rel=0.03)
    shares = [row["value"] for row in records.read_metrics(job.url).to_pylist() if row["name"] == "padding_share"]
    assert after.views.padding_share == pytest.approx(float(np.mean(shares)), abs=0.03)


def test_the_weight_is_said_in_both_units(home: Home) -> None:
    found = forecast.forecast(training.small_recipe("precision=auto"), home, ranks=4, on_gpu=True)
    assert (found.sigreg_weight, found.views_per_sample, found.batch_per_rank) == (20.48, 4, 4)
    assert found.sigreg_lambda == pytest.approx(20.48 / 16) and found.precision == "bf16"
    ntp = forecast.forecast(training.small_recipe(arm="next-token"), home, ranks=1, on_gpu=False)
    assert ntp.sigreg_weight is None and ntp.views_per_sample == 1


def test_more_ranks_cost_the_same_and_take_less_time(home: Home) -> None:
    one, four = (forecast.forecast(training.small_recipe(), home, ranks=n, on_gpu=False) for n in (1, 4))
    assert one.device_hours == pytest.approx(four.device_hours) and four.wall_hours == pytest.approx(one.wall_hours / 4)
    assert four.memory_bytes < one.memory_bytes


def test_ranks_that_do_not_divide_the_lanes_are_refused_before_anything_starts(home: Home) -> None:
    with pytest.raises(ConfigError, match="3 ranks do not divide the 4 lanes"):
        forecast.forecast(training.small_recipe(), home, ranks=3, on_gpu=False)


def test_an_unknown_dataset_is_named(home: Home) -> None:
    with pytest.raises(InputError, match="no dataset 'nowhere'"):
        forecast.forecast(training.small_recipe("data.dataset=nowhere"), home, ranks=1, on_gpu=False)


def test_a_plan_is_made_where_the_tokenizer_cannot_be_loaded(home: Home, tmp_path: Path) -> None:
    found = forecast.forecast(training.small_recipe(f"tokenizer.source={tmp_path}"), home, ranks=1, on_gpu=False)
    assert found.tokenizer_problem is not None and found.views.source == "estimated"
    assert found.parameters == forecast.encoder_parameters(training.small_recipe().encoder)


def test_bad_views_and_next_tokens_read_one_caption_a_sample(home: Home) -> None:
    good, bad = (
        forecast.forecast(training.small_recipe(arm=arm), home, ranks=1, on_gpu=False) for arm in ("good", "bad")
    )
    assert good.facts.tokens > 3 * bad.facts.tokens
    materials = assemble(training.small_recipe(arm="next-token"), home)
    model = build_model(recipe.with_tokenizer(materials.recipe, vocab_size=600, pad_token_id=0))
    assert model.encoder.projector is None
