"""What a training will take, before anything is started: what `goodviews train --plan` prints.

Owns: floating point operations, memory, padding and cost of a recipe on N devices. Does not own: steps, samples, drops and
caption tokens (`trainer.data.plan_summary`), nor the plan.
Invariant: starts no Ray and builds no model (a `corpus` tokenizer is trained when there is none yet); each number is measured or says that it is an estimate.

Operations: a product of (n, a) by (a, b) is 2 n a b, backward is twice forward, so training is 3 times forward; attention is
4 layers width sum(length^2) forward. Recomputation (SIGReg, next-token logits) is not counted, as in the usual MFU.
Memory: 16 bytes a parameter (weights, gradients, two moments of AdamW, all float32) and what autograd keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from infra.errors import InputError
from infra.home import Home
from trainer.data.cache import TokenCache
from trainer.data.plan import Plan, make_plan
from trainer.data.plan_summary import PlanFacts, plan_facts
from trainer.data.ragged import padding_share
from trainer.data.stream import Stream
from trainer.data.views import ViewsConfig
from trainer.model.encoder import EncoderConfig
from trainer.run.assembly import find_shards, load_tokenizer
from trainer.run.recipe import Recipe, with_tokenizer

PARAMETER_BYTES: Final = 16
KEPT_BYTES: Final = {"fp32": 84, "bf16": 70}
"Of autograd, per token, layer and unit of width; counted through saved-tensor hooks at 2 to 4 layers of 128 and 384."
MEASURED_STEPS: Final = 4
SPREAD: Final = 0.4
"Standard deviation of caption lengths over their mean, where no cache tells: .41 for multi30k."


@dataclass(frozen=True, kw_only=True)
class ViewFacts:
    """Mean over samples: tokens and squared lengths of all views of one sample, and padding inside attention."""

    tokens: float
    squares: float
    padding_share: float
    source: str
    "`measured` on batches of the cache, or `estimated` from the mean length of captions."


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The numbers of `--plan`. Memory is of one rank, bytes; hours are of one device unless they are named wall."""

    recipe: str
    arm: str
    objective: str
    facts: PlanFacts
    views: ViewFacts
    views_per_sample: int
    tokens_trained: int
    "Tokens of all views of all steps, special ones included."
    ranks: int
    batch_per_rank: int
    precision: str
    parameters: int
    "Of the encoder that is exported."
    parameters_trained: int
    memory_bytes: int
    sigreg_weight: float | None
    sigreg_lambda: float | None
    "w over views times batch per rank: what the public code calls lambda when it is run on these ranks."
    flops: float
    device: str
    peak_tflops: float
    mfu: float
    device_hours: float
    wall_hours: float
    tokenizer_problem: str | None = None
    "Why the tokenizer could not be loaded; tokens are then estimated from bytes, and the vocabulary is the recipe's."


def forecast(recipe: Recipe, home: Home, *, ranks: int, on_gpu: bool) -> Forecast:
    """Everything `--plan` prints. Raises like the start of the training itself for a recipe that cannot start.

    ranks: at least 1. on_gpu: decides the precision that `auto` means.
    """
    recipe, shards = find_shards(recipe, home)
    cache, problem = None, None
    try:
        tokenizer = load_tokenizer(recipe, shards, home)
        recipe = with_tokenizer(recipe, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.special.pad)
        cache = TokenCache(shards, tokenizer, home)
    except InputError as error:
        # A plan is worth having where the tokenizer cannot be loaded, such as a laptop without its cache.
        recipe, problem = with_tokenizer(recipe, vocab_size=recipe.encoder.vocab_size, pad_token_id=0), str(error)
    plan = make_plan(recipe.plan, shards, home)
    plan.stripe(0, ranks)
    facts = plan_facts(plan, cache)
    views = _measured(plan, cache, recipe) or _estimated(facts, plan, recipe)
    found = _forecast(recipe, facts, views, ranks=ranks, on_gpu=on_gpu)
    return dataclasses.replace(found, tokenizer_problem=problem)


def _forecast(recipe: Recipe, facts: PlanFacts, views: ViewFacts, *, ranks: int, on_gpu: bool) -> Forecast:
    config, cost = recipe.encoder, recipe.forecast
    per_rank = facts.batch_global // ranks
    is_lejepa = recipe.objective == "lejepa"
    flops = facts.samples * train_flops(config, views.tokens, views.squares, recipe.views.n_views)
    hours = flops / (cost.peak_tflops * 1e12 * cost.mfu) / 3600
    precision = precision_of(recipe, on_gpu=on_gpu)
    return Forecast(
        recipe=recipe.name,
        arm=recipe.arm,
        objective=recipe.objective,
        facts=facts,
        views=views,
        views_per_sample=recipe.views.n_views,
        tokens_trained=round(views.tokens * facts.samples),
        ranks=ranks,
        batch_per_rank=per_rank,
        precision=precision,
        parameters=encoder_parameters(config),
        parameters_trained=encoder_parameters(config) + projector_parameters(config),
        memory_bytes=memory_bytes(
            config, views.tokens * per_rank, recipe.views.n_views * per_rank, precision=precision, on_gpu=on_gpu
        ),
        sigreg_weight=recipe.lejepa.weight if is_lejepa else None,
        sigreg_lambda=recipe.lejepa.weight / (recipe.views.n_views * per_rank) if is_lejepa else None,
        flops=flops,
        device=cost.device,
        peak_tflops=cost.peak_tflops,
        mfu=cost.mfu,
        device_hours=hours,
        wall_hours=hours / ranks,
    )


def precision_of(recipe: Recipe, *, on_gpu: bool) -> str:
    """`bf16` or `fp32`."""
    return ("bf16" if on_gpu else "fp32") if recipe.precision == "auto" else recipe.precision


# --- the model as arithmetic --------------------------------------------------------------------------------------


def encoder_parameters(config: EncoderConfig) -> int:
    """Parameters of the BERT without pooler: embeddings with their LayerNorm, then the layers."""
    w, f = config.width, config.ffn
    embeddings = (config.vocab_size + config.max_tokens + 2) * w + 2 * w
    layer = 4 * (w * w + w) + (w * f + f) + (f * w + w) + 2 * 2 * w
    return embeddings + config.layers * layer


def projector_parameters(config: EncoderConfig) -> int:
    """Parameters of the projector with its two BatchNorms; 0 without one."""
    p = config.projector
    if p is None:
        return 0
    widths = [config.width, p.entry, p.hidden, p.hidden, p.output]
    return sum(a * b + b for a, b in itertools.pairwise(widths)) + 2 * 2 * p.hidden


def train_flops(config: EncoderConfig, tokens: float, squares: float, sequences: float) -> float:
    """Operations of one forward and backward pass over `tokens` tokens in `sequences` sequences.

    squares: sum of the squared lengths of the sequences.
    """
    w, p = config.width, config.projector
    matrices = config.layers * (4 * w * w + 2 * w * config.ffn)
    forward = 2.0 * matrices * tokens + 4.0 * config.layers * w * squares
    if p is not None:
        forward += 2.0 * sequences * (w * p.entry + p.entry * p.hidden + p.hidden * p.hidden + p.hidden * p.output)
    if config.causal:
        forward += 2.0 * config.vocab_size * w * tokens
    return 3.0 * forward


def memory_bytes(config: EncoderConfig, tokens: float, sequences: float, *, precision: str, on_gpu: bool) -> int:
    """Estimate for one rank with `tokens` tokens in `sequences` sequences a step; the framework itself comes on top."""
    kept = KEPT_BYTES[precision] * tokens * config.layers * config.width
    states = PARAMETER_BYTES * (encoder_parameters(config) + projector_parameters(config))
    p = config.projector
    # Each hidden layer keeps its input, its normalised rows and its output, float32.
    projector = 0.0 if p is None else 4.0 * sequences * (config.width + p.entry + 6 * p.hidden + p.output)
    # Logits and projections are worked on in tiles; DistributedDataParallel keeps a copy of the gradients.
    tiles = (256 << 20) * 2 if on_gpu else (16 << 20) * 2
    return round(states + states / 4 + kept + projector + tiles)


# --- tokens of views ----------------------------------------------------------------------------------------------


def _measured(plan: Plan, cache: TokenCache | None, recipe: Recipe) -> ViewFacts | None:
    """From the first batches, when all of their shards are cached."""
    if cache is None:
        return None
    stream = Stream(plan, cache, recipe.views)
    steps = min(MEASURED_STEPS, plan.total_steps)
    if any(cache.token_counts(ordinal, bad_pass) is None for _, ordinal, bad_pass in stream.needed(0, steps)):
        return None
    lengths = [batch.views.lengths for batch in stream.batches(0, steps)]
    return _view_facts(lengths, plan, recipe, source="measured")


def _estimated(facts: PlanFacts, plan: Plan, recipe: Recipe) -> ViewFacts:
    """From the mean length of captions: lengths drawn from a gamma distribution of spread `SPREAD`, then cut like views."""
    if facts.captions == 0 or facts.samples == 0:
        raise InputError(
            f"Split {facts.split} of {facts.dataset}@{facts.version} has no caption to count. Check its rejects."
        )
    fraction = recipe.plan.good_fraction
    per_scene = facts.captions / max(facts.scenes, 1)
    mean = facts.tokens / facts.samples / (fraction * per_scene + 1 - fraction)
    draws = np.random.Generator(np.random.PCG64(0))
    b = plan.config.batch_global
    lengths = [_cut(draws, draws.gamma(SPREAD**-2, mean * SPREAD**2, b), recipe.views) for _ in range(MEASURED_STEPS)]
    return _view_facts(lengths, plan, recipe, source="estimated")


def _cut(draws: np.random.Generator, captions: NDArray[np.float64], views: ViewsConfig) -> NDArray[np.int64]:
    whole = np.clip(np.round(captions), 1, views.max_tokens - 2)
    shares = [draws.uniform(low, high, len(whole)) for low, high in views.spans]
    return (np.maximum(1, np.round(np.stack(shares) * whole)) + 2).astype(np.int64).ravel()


def _view_facts(lengths: list[NDArray[np.int64]], plan: Plan, recipe: Recipe, *, source: str) -> ViewFacts:
    samples = len(lengths) * plan.config.batch_global
    every = np.concatenate(lengths).astype(np.float64)
    return ViewFacts(
        tokens=float(every.sum()) / samples,
        squares=float(np.square(every).sum()) / samples,
        padding_share=float(np.mean([padding_share(part, recipe.encoder.length_groups) for part in lengths])),
        source=source,
    )
