"""What a training reads and trains, made from its recipe: shards, tokenizer, plan, cache, stream, model.

Invariant: the same recipe, dataset version and HOME give the same materials in every process. So only the record of the
run is sent to the ranks, and each rank checks its digests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from catalog.versions.current import current_version
from infra import seeds
from infra.errors import ConflictError
from infra.home import Home
from trainer.data import tokenizer as tokenizers
from trainer.data import wordpiece
from trainer.data.cache import TokenCache
from trainer.data.plan import Plan, make_plan
from trainer.data.shardset import ShardSet, open_shards
from trainer.data.stream import Stream
from trainer.data.tokenizer import TextTokenizer
from trainer.model.encoder import TextEncoder
from trainer.model.objectives import LejepaModel, NextTokenModel
from trainer.run.recipe import Recipe, with_tokenizer
from trainer.run.records import RunRecord


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What a training reads. recipe: with dataset version, vocabulary and causality filled in."""

    recipe: Recipe
    home: Home
    shards: ShardSet
    tokenizer: TextTokenizer
    plan: Plan
    cache: TokenCache

    def stream(self, *, rank: int, world: int) -> Stream:
        """The batches of one rank."""
        workers = self.recipe.run.loader_workers
        return Stream(self.plan, self.cache, self.recipe.views, rank=rank, world=world, workers=workers)


def find_shards(recipe: Recipe, home: Home) -> tuple[Recipe, ShardSet]:
    """The shards, and the recipe with their dataset version: the current one unless the recipe names one."""
    data = recipe.data
    version = data.version or current_version(home, data.dataset)
    shards = open_shards(home, data.dataset, version, data.split, kind=data.tars)
    return dataclasses.replace(recipe, data=dataclasses.replace(data, version=version)), shards


def load_tokenizer(recipe: Recipe, shards: ShardSet, home: Home) -> TextTokenizer:
    """The tokenizer of the recipe. A `corpus` tokenizer is trained unless HOME has it already."""
    if recipe.tokenizer.source == "corpus":
        return wordpiece.corpus(shards, home, vocab_size=recipe.tokenizer.vocab_size)
    return tokenizers.load(recipe.tokenizer.source)


def assemble(recipe: Recipe, home: Home) -> Materials:
    """All that the ranks read, computed from manifests and captions without a process group."""
    recipe, shards = find_shards(recipe, home)
    tokenizer = load_tokenizer(recipe, shards, home)
    recipe = with_tokenizer(recipe, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.special.pad)
    return Materials(
        recipe=recipe,
        home=home,
        shards=shards,
        tokenizer=tokenizer,
        plan=make_plan(recipe.plan, shards, home),
        cache=TokenCache(shards, tokenizer, home),
    )


def check_record(materials: Materials, record: RunRecord) -> None:
    """Raises ConflictError when plan or tokenizer differ from those that the run was started with."""
    pairs = {
        "plan": (materials.plan.digest, record.plan_digest),
        "tokenizer": (materials.tokenizer.digest, record.tokenizer_digest),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            message = (
                f"Run {record.run_id} was started with {name} {there}, this process makes {name} {here}. Files of HOME "
                "or of the tokenizer have changed, or this is another release. Start a new run."
            )
            raise ConflictError(message)


def build_model(recipe: Recipe) -> LejepaModel | NextTokenModel:
    """Encoder and objective with new weights from the seed of the recipe, equal on every rank."""
    # Before the model: torch draws its weights from the global generator.
    torch.manual_seed(seeds.derive(recipe.seed, "weights"))
    encoder = TextEncoder(recipe.encoder)
    if recipe.objective == "ntp":
        return NextTokenModel(encoder)
    return LejepaModel(encoder, recipe.lejepa, n_views=recipe.views.n_views, n_global=recipe.views.n_global)
