"""A recipe: all settings of a training, as one complete TOML file, and its arms.

Sections of other modules stand beside their owners; this module has `data`, `tokenizer`, `run` and `forecast`.
Invariants: `run` holds resources and reporting and may change on a resume; what decides the result is outside it. An
arm is a table of the recipe with the keys that it changes.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import orjson

from infra import config as configuration
from infra import storage
from infra.errors import ConfigError, UsageError
from trainer.data.plan import PlanConfig
from trainer.data.views import ViewsConfig
from trainer.model.encoder import EncoderConfig
from trainer.model.objectives import LejepaConfig
from trainer.model.optimizer import OptimizerConfig
from trainer.run.alarms import AlarmConfig

Override: TypeAlias = bool | int | float | str | list[int] | list[float] | list[str]

ARMS: Final = ("good", "bad", "next-token", "caption-pair")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which scenes are trained on."""

    dataset: str
    version: str | None = None
    "None: the current version; the run records which one."
    split: str = "train"
    validation_split: str | None = None
    "Split for the loss of next-token prediction, on one caption a scene; None: no validation."
    tars: Literal["good", "bad"] = "good"
    "Good tars serve every arm; bad tars serve bad views only, for versions without good tars."


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer. source: `corpus` (WordPiece trained on the captions), a folder, or a Hugging Face name."""

    source: str = "corpus"
    vocab_size: int = 8_192
    "Upper limit for a `corpus` tokenizer."


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """What `--plan` assumes for its cost estimate."""

    device: str = "NVIDIA A100"
    peak_tflops: float = 312.0
    "Dense bf16 of one device. A100: 312, from its data sheet."
    mfu: float = 0.3
    "Share of the peak that a training reaches (model FLOPs utilisation)."


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Resources and reporting, which do not change what is learned."""

    threads: int | None = None
    "Threads of torch in each rank; None: as the process was started (Ray gives a worker one for each CPU)."
    loader_workers: int = 1
    "Threads of each rank that prepare batches ahead; 0: each batch is made when it is needed."
    log_every_steps: int = 20
    health_every_steps: int = 100
    "How often effective rank and spread of pooled vectors are measured."
    record_every_steps: int = 500
    "How often ledger and metrics are published, besides every checkpoint."
    checkpoint_every_steps: int | None = None
    "In addition to the end of each epoch."
    keep_checkpoints: int = 2
    checkpoints: str | None = None
    "URL of a folder for the checkpoints of many runs; None: in the folder of the run."
    catalog_every_s: float = 120.0
    "Least time between two updates of the catalog; the end of a run always updates it."
    max_failures: int = 3
    "Restarts after lost ranks."
    exclude_trackers: tuple[str, ...] = ()
    "Trackers to leave out: tensorboard, wandb, mlflow."

    def __post_init__(self) -> None:
        counts = ("log_every_steps", "health_every_steps", "record_every_steps", "keep_checkpoints")
        small = [name for name in counts if getattr(self, name) < 1]
        small += [name for name in ("threads", "checkpoint_every_steps") if (getattr(self, name) or 1) < 1]
        small += [name for name in ("loader_workers", "max_failures", "catalog_every_s") if getattr(self, name) < 0]
        if small:
            least = 0 if small[0] in ("loader_workers", "max_failures", "catalog_every_s") else 1
            raise ConfigError(f"run.{small[0]} is {getattr(self, small[0])}; it must be at least {least}.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training. Raises ConfigError for sections that contradict each other."""

    name: str
    arm: str = "good"
    "The arm that was applied, one of `arms`."
    objective: Literal["lejepa", "ntp"] = "lejepa"
    data: DataConfig
    plan: PlanConfig
    views: ViewsConfig = field(default_factory=ViewsConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    encoder: EncoderConfig
    lejepa: LejepaConfig
    optimizer: OptimizerConfig
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    "Of the encoder's forward pass (autocast); auto: bf16 on a GPU, fp32 on a CPU. Losses and weights are always fp32."
    compile: bool = False
    "torch.compile for the encoder: slow to start, and results are not bit-identical to those without."
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    run: RunConfig = field(default_factory=RunConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    arms: Mapping[str, Mapping[str, Override]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        views = self.views
        if views.max_tokens > self.encoder.max_tokens:
            message = (
                f"views.max_tokens is {views.max_tokens}, encoder.max_tokens {self.encoder.max_tokens}: views could be "
                "longer than the encoder has positions. Lower the first or raise the second."
            )
            raise ConfigError(message)
        if self.objective == "ntp":
            whole = (views.n_global, views.n_local, tuple(views.global_span), views.masked) == (1, 0, (1.0, 1.0), 0.0)
            if not whole:
                message = (
                    "Next-token prediction reads one whole caption, but `views` makes several views, cuts spans or "
                    "masks. Use the arm `next-token`: views.n_global = 1, n_local = 0, global_span = [1.0, 1.0], "
                    "masked = 0.0."
                )
                raise ConfigError(message)
        elif views.n_views < 2:
            raise ConfigError("LeJEPA needs at least 2 views of a sample. Raise views.n_global or views.n_local.")

    @property
    def seed(self) -> int:
        """Root seed of order, views, weights and dropout."""
        return self.plan.seed


def built_in() -> list[str]:
    """Names of the built-in recipes."""
    folder = importlib.resources.files("trainer") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name: str, *, arm: str | None = None, sets: Sequence[str] = ()) -> Recipe:
    """A built-in recipe by name, or a TOML file, changed by an arm and then by `a.b=v`.

    arm: None takes the arm that `sets` imply (objective ntp: next-token; good_fraction 0: bad), else that of the file.
    Raises UsageError for an unknown recipe or arm, ConfigError for wrong keys and values.
    """
    file = _find(name)
    plain = configuration.load(Recipe, file=file)
    chosen = arm or _arm_of(sets) or plain.arm
    if chosen not in plain.arms and (arm is not None or chosen != plain.arm):
        known = ", ".join(sorted(plain.arms)) or "none"
        raise UsageError(
            f"Recipe {plain.name!r} has no arm {chosen!r}, only {known}. Add a table [arms.{chosen}] to it."
        )
    changes = [f"{key}={_toml(value)}" for key, value in plain.arms.get(chosen, {}).items()]
    return configuration.load(Recipe, file=file, sets=[*changes, f"arm={chosen}", *sets])


def to_config(recipe: Recipe) -> dict[str, Any]:
    """The resolved config as plain values, for records; without the table of arms, which was applied."""
    plain = configuration.to_dict(recipe)
    del plain["arms"]
    return plain


def from_config(config: Mapping[str, Any], sets: Sequence[str] = ()) -> Recipe:
    """The recipe that `to_config` wrote, changed by `a.b=v`."""
    return configuration.load(Recipe, sets=[*(f"{key}={_toml(value)}" for key, value in _leaves(config)), *sets])


def digest(recipe: Recipe) -> str:
    """16 hex digits over all that decides what is learned: not `run`, `forecast` and the names."""
    config = to_config(recipe)
    # Arm and name are labels: what an arm changes is in the other keys.
    for name in ("run", "forecast", "name", "arm"):
        del config[name]
    return hashlib.sha256(orjson.dumps(config, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _arm_of(sets: Sequence[str]) -> str | None:
    wanted = dict(text.partition("=")[::2] for text in sets)
    if wanted.get("objective", "").strip("\"' ") == "ntp":
        return "next-token"
    fraction = wanted.get("plan.good_fraction")
    try:
        return None if fraction is None else "bad" if float(fraction or 0) == 0 else "good"
    except ValueError:
        return None  # not a number: loading the config raises, with the name of the key


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", value


def _toml(value: Override) -> str:
    # For these types JSON is valid TOML: orjson writes 1.0 with its point.
    return orjson.dumps(value).decode()


def _find(name: str) -> str:
    if name.endswith(".toml"):
        if not storage.exists(name):
            raise UsageError(f"There is no recipe file {name}. Built-in recipes are {', '.join(built_in())}.")
        return name
    if name not in built_in():
        near = difflib.get_close_matches(name, built_in(), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(built_in())}, or name a .toml file."
        raise UsageError(f"There is no recipe {name!r}. {hint}")
    return str(importlib.resources.files("trainer") / "recipes" / f"{name}.toml")


def with_tokenizer(recipe: Recipe, *, vocab_size: int, pad_token_id: int) -> Recipe:
    """The recipe with the encoder settings that follow from the tokenizer and the objective."""
    is_ntp = recipe.objective == "ntp"
    encoder = dataclasses.replace(
        recipe.encoder,
        vocab_size=vocab_size,
        pad_token_id=pad_token_id,
        causal=is_ntp,
        projector=None if is_ntp else recipe.encoder.projector,
    )
    return dataclasses.replace(recipe, encoder=encoder)
