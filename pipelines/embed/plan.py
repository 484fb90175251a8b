"""Options of an embedding job, the shards it reads, and the digest that names its set.

Invariant: everything that decides a vector is in the digest; workers, paths, budgets and the size of batches are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog import schema
from catalog.lake import lake
from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from catalog.versions.current import find_version
from catalog.versions.published import read_version
from infra import storage
from infra.errors import ConflictError, InputError, UsageError
from infra.home import Home
from infra.models.registry import Model, find_model
from infra.version import code_version
from pipelines.embed.images import holds_pictures, sources_digest

ROW_LAYOUT: Final = "1"
"Version of what this job does with texts and pictures. Raise it with every change that changes a vector or a key."
AVERAGING: Final = "unit(mean(unit(caption)))"


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Options of one set. layers, pooling: as in `infra.models.encoders.describe`. images: folders and tars."""

    model: str
    dataset: str
    split: str
    observation: str
    version: str | None = None
    images: tuple[str, ...] = ()
    layers: str = "last"
    pooling: str | None = None
    dtype: str = "float16"
    roles: tuple[str, ...] = ()
    name: str | None = None
    batch_tokens: int = 8192
    max_missing_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.observation not in embeddings.OBSERVATIONS:
            raise UsageError(
                f"--of is {self.observation!r}; one of {', '.join(embeddings.OBSERVATIONS)} can be embedded."
            )
        if self.dtype not in embeddings.DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}; vectors are kept as {' or '.join(embeddings.DTYPES)}.")
        if unknown := [role for role in self.roles if role not in schema.ROLES]:
            raise UsageError(f"--roles names {unknown[0]!r}; the roles are {', '.join(schema.ROLES)}.")
        if self.roles and self.observation == "images":
            raise UsageError("--roles chooses captions, but --of images embeds pictures. Leave it out.")
        if self.images and self.observation != "images":
            raise UsageError(
                f"--images names pictures, but --of is {self.observation}. Leave it out, or use --of images."
            )
        if self.batch_tokens < 1:
            raise UsageError(f"--batch-tokens is {self.batch_tokens}, but a batch holds 1 token or more.")
        if not 0 <= self.max_missing_rate <= 1:
            raise UsageError(f"--max-missing-rate is {self.max_missing_rate}; it is a share, from 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard of the dataset; urls of its scenes and of its good tar."""

    name: str
    number: int
    scenes_url: str
    tar_url: str | None


@dataclass(frozen=True, kw_only=True)
class EmbedPlan:
    """A job with its model, shards and set. Picklable; workers need nothing else.

    facts: an `infra.models.facts.Facts`. record: of the set, without rows and files.
    """

    home: Home
    config: EmbedConfig
    model: Model
    facts: Any
    record: EmbeddingRecord
    shards: tuple[Shard, ...]

    @property
    def work_url(self) -> str:
        """Folder of the records of finished shards, until the set is published."""
        return self.home.work("embed", self.record.embedding_id)


def plan_embedding(config: EmbedConfig, home: Home) -> EmbedPlan:
    """Find model, version and shards, and name the set. Raises InputError or UsageError for what is missing."""
    from infra.models import encoders
    from infra.models.facts import meaning_of_layers

    with lake.reading(home) as reader:
        source = find_version(reader, config.dataset, config.version)
    shards = _shards(home, config, source.version)
    model = find_model(config.model, home)
    modality = "image" if config.observation == "images" else "text"
    facts = encoders.describe(model, modality=modality, layers=config.layers, pooling=config.pooling)
    content = _content(config, source.version, model, dataclasses.asdict(facts), shards)
    embedding_id = embeddings.embedding_id_of(content)
    record = EmbeddingRecord(
        embedding_id=embedding_id,
        name=config.name or _default_name(config, model, facts, None if source.is_current else source.version),
        model=model.label,
        run_id=model.run_id,
        observation=config.observation,
        dataset=config.dataset,
        version=source.version,
        split=config.split,
        roles=tuple(content["roles"]),
        layers=facts.layers,
        pooling=facts.pooling,
        averaging=content["averaging"],
        max_length=facts.max_length,
        rows=0,
        dims=facts.dims,
        dtype=config.dtype,
        samples=model.samples,
        tokens=model.tokens,
        config={"content": content, "training": model.training, "layers": meaning_of_layers(facts)},
        url=embeddings.set_url(home, embedding_id),
        snapshot_id=source.snapshot_id,
        dataset_versions={config.dataset: source.version},
        code_version=code_version(),
        created_at=0.0,
    )
    return EmbedPlan(home=home, config=config, model=model, facts=facts, record=record, shards=shards)


def _default_name(config: EmbedConfig, model: Model, facts: Any, version: str | None) -> str:
    """model/dataset/split/observation, then each option that is not at its default, so that two sets have two names.

    version: of the dataset, where it is not the current one.
    """
    from infra.models import encoders

    dataset = config.dataset if version is None else f"{config.dataset}@{version}"
    parts = [f"{model.short_name}/{dataset}/{config.split}/{config.observation}"]
    if facts.layers != (facts.blocks,):
        is_all = len(facts.layers) == facts.blocks + (facts.pooling != "cls")
        parts.append(f"layers={'all' if is_all else ','.join(map(str, facts.layers))}")
    if config.pooling and config.pooling != encoders.default_pooling(model, modality=facts.modality):
        parts.append(f"pool={facts.pooling}")
    if config.roles:
        parts.append(f"roles={','.join(sorted(set(config.roles)))}")
    if config.dtype != EmbedConfig.dtype:
        parts.append(f"dtype={config.dtype}")
    return "+".join(parts)


def _content(
    config: EmbedConfig, version: str, model: Model, facts: Mapping[str, Any], shards: Sequence[Shard]
) -> dict[str, Any]:
    return {
        # The keys and their values are hashed: a changed or added key gives every set another id.
        "layout": ROW_LAYOUT,
        # A model folder may be copied or renamed; the checkpoints of a run differ even where their weights are equal.
        "model": None if model.label == model.url else model.label,
        "weights": model.weights,
        "tokenizer": model.tokenizer,
        "facts": {**facts, "layers": list(facts["layers"])},
        "dataset": config.dataset,
        "version": version,
        "split": config.split,
        "roles": sorted(set(config.roles)),
        "observation": config.observation,
        "averaging": AVERAGING if config.observation == "scenes" else "none",
        "pictures": _pictures(config, shards) if config.observation == "images" else None,
        "dtype": config.dtype,
    }


def _pictures(config: EmbedConfig, shards: Sequence[Shard]) -> str:
    """Where images come from, as it stands in the digest."""
    if config.images:
        return sources_digest(config.images)
    if not any(shard.tar_url is not None and holds_pictures(shard.tar_url) for shard in shards):
        message = f"The good tars of {config.dataset} hold no pictures. Name a folder or tar of them with --images."
        raise InputError(message)
    return "good tars"


def published_set(home: Home, embedding_id: str, *, name: str | None, subject: str) -> EmbeddingRecord | None:
    """The set, registered in the catalog, if it is published and its files are whole; else None.

    name: as asked for; None for any. subject: begins the sentence of the ConflictError for a set of another name.
    """
    if not storage.exists(embeddings.set_url(home, embedding_id, embeddings.MANIFEST)):
        return None
    record = embeddings.read_record(home, embedding_id)
    if name is not None and name != record.name:
        raise ConflictError(
            f"{subject} there already, as {record.name!r} ({embedding_id}). Use that name, or remove {record.url} "
            "first."
        )
    if not all(embeddings.is_whole(home, record, file) for file in record.files):
        return None
    embeddings.register(home, record)
    return record


def _shards(home: Home, config: EmbedConfig, version: str) -> tuple[Shard, ...]:
    found = read_version(home, config.dataset, version)
    manifests = [m for m in found.manifests if m.split == config.split and m.scenes]
    if not manifests:
        splits = ", ".join(sorted({m.split for m in found.manifests if m.scenes})) or "none"
        raise InputError(f"{found.name} has no scene in the split {config.split!r}. Its splits are: {splits}.")
    shards = []
    for manifest in sorted(manifests, key=lambda m: m.shard):
        kinds = {file.kind: storage.join(found.folder, file.path) for file in manifest.files}
        name = schema.shard_name(manifest.split, manifest.shard)
        shards.append(Shard(name=name, number=manifest.shard, scenes_url=kinds["scenes"], tar_url=kinds.get("good")))
    return tuple(shards)
