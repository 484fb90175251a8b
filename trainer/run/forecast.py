"""Steps, tokens, memory and cost of a training before it starts: the numbers of `goodviews train --plan`.

Steps, samples and caption tokens come from `trainer.data.plan_summary`.
Invariant: starts no Ray and builds no model (a `corpus` tokenizer is trained when HOME has none). Each number is
measured, or the output says that it is an estimate.

Operations: a product of (n, a) by (a, b) costs 2 n a b; backward costs twice forward, so training is 3 times forward.
Attention costs 4 layers width sum(length^2) forward. Recomputation (SIGReg, next-token logits) is left out, as is usual
for the model FLOPs utilisation (MFU).
Memory: 16 bytes a parameter (weight, gradient, two moments of AdamW, all float32), and what autograd keeps.
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
"Bytes that autograd keeps per token, layer and unit of width; counted with saved-tensor hooks on small encoders."
MEASURED_STEPS: Final = 4
SPREAD: Final = 0.4
"Standard deviation of caption lengths over their mean, assumed where no cache can tell; multi30k has .41."


@dataclass(frozen=True, kw_only=True)
class ViewFacts:
    """Means over samples. tokens, squares: sums of lengths and of squared lengths over the views of one sample."""

    tokens: float
    squares: float
    padding_share: float
    "Of the positions in attention."
    source: str
    "`measured` on batches of the cache, or `estimated` from the mean length of captions."


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The numbers of `--plan`. memory_bytes: of one rank; device_hours: summed over devices."""

    recipe: str
    arm: str
    objective: str
    facts: PlanFacts
    views: ViewFacts
    views_per_sample: int
    tokens_trained: int
    "Of all views at all steps, special tokens included."
    ranks: int
    batch_per_rank: int
    precision: str
    parameters: int
    "Of the exported encoder."
    parameters_trained: int
    memory_bytes: int
    sigreg_weight: float | None
    sigreg_lambda: float | None
    "w / (views x batch per rank): lambda of the public code on as many ranks."
    flops: float
    device: str
    peak_tflops: float
    mfu: float
    device_hours: float
    wall_hours: float
    tokenizer_problem: str | None = None
    "Why the tokenizer could not be loaded; then tokens are estimated from bytes, with the recipe's vocabulary size."


def forecast(recipe: Recipe, home: Home, *, ranks: int, on_gpu: bool) -> Forecast:
    """Everything that `--plan` prints. Raises like the training itself for a recipe that cannot start.

    on_gpu: decides the precision `auto`.
    """
    recipe, shards = find_shards(recipe, home)
    cache, problem = None, None
    try:
        tokenizer = load_tokenizer(recipe, shards, home)
        recipe = with_tokenizer(recipe, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.special.pad)
        cache = TokenCache(shards, tokenizer, home)
    except InputError as error:
        # A plan is useful where the tokenizer cannot be loaded, such as offline on a laptop.
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
    """Parameters of the BERT without pooler."""
    w, f = config.width, config.ffn
    # Words, positions and two token types, then LayerNorm. A layer: attention, feed-forward, two LayerNorms.
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
    """Estimate for a rank with `tokens` tokens in `sequences` sequences a step, without the framework itself."""
    kept = KEPT_BYTES[precision] * tokens * config.layers * config.width
    states = PARAMETER_BYTES * (encoder_parameters(config) + projector_parameters(config))
    p = config.projector
    # Each hidden layer keeps its input, its normalised rows and its output in float32.
    projector = 0.0 if p is None else 4.0 * sequences * (config.width + p.entry + 6 * p.hidden + p.output)
    # Logits and projections are computed in tiles; DistributedDataParallel keeps a copy of the gradients (states / 4).
    tiles = (256 << 20) * 2 if on_gpu else (16 << 20) * 2
    return round(states + states / 4 + kept + projector + tiles)


# --- tokens of views ----------------------------------------------------------------------------------------------


def _measured(plan: Plan, cache: TokenCache | None, recipe: Recipe) -> ViewFacts | None:
    """Facts of the first batches; None unless all of their shards are in the token cache."""
    if cache is None:
        return None
    stream = Stream(plan, cache, recipe.views)
    steps = min(MEASURED_STEPS, plan.total_steps)
    if any(cache.token_counts(ordinal, bad_pass) is None for _, ordinal, bad_pass in stream.needed(0, steps)):
        return None
    lengths = [batch.views.lengths for batch in stream.batches(0, steps)]
    return _view_facts(lengths, plan, recipe, source="measured")


def _estimated(facts: PlanFacts, plan: Plan, recipe: Recipe) -> ViewFacts:
    """Facts from the mean caption length: lengths drawn from a gamma distribution, then cut like views."""
    if facts.captions == 0 or facts.samples == 0:
        raise InputError(f"Split {facts.split} of {facts.dataset}@{facts.version} has no caption. Check its rejects.")
    fraction = recipe.plan.good_fraction
    per_scene = facts.captions / max(facts.scenes, 1)
    # A good sample reads all captions of its scene, a bad one reads one.
    mean = facts.tokens / facts.samples / (fraction * per_scene + 1 - fraction)
    # Shape 1 / SPREAD^2 gives a gamma distribution that spread.
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
