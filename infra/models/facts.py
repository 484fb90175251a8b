"""Families of models: the towers, layers, dims, pooling and length of each; a new family is often a line here.

Imports neither torch nor transformers. Invariant: a model whose vectors would say nothing of the text or picture is
refused here, before anything is loaded.

Layers: n < L is the n-th hidden state (0: what the first block reads); L, the last, is the model's own output, behind
the final norm where it has one (GPT, Llama, CLIP, ViT, DINO), which the L-th hidden state of `output_hidden_states` may
not be. The first token of layer 0 is the same vector for every text or picture, so there is no layer 0 under the
pooling cls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from infra.errors import InputError, UsageError
from infra.models.pictures import EFFICIENTNET_PREPROCESSING
from infra.models.registry import Model, chosen_layers, max_length, read_json, recorded_pooling

POOLINGS: Final = ("mean", "cls", "last")
PARTS: Final = {"clip": {"text": "CLIPTextModel", "image": "CLIPVisionModel"}}
"""Models of two towers: what to load of each."""
CLS_PICTURES: Final = frozenset(
    {"beit", "clip", "clip_vision_model", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit"}
    | {"vit", "vit_msn"}
)
"Kinds of picture models whose first token stands for the picture; in others it is a patch in the corner."


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides a model's vectors beside its files; known without its weights.

    modality: text or image. layers: the chosen ones, ascending. blocks: L. max_length: tokens after which a text is
    cut, special ones included. compute: dtype of the forward pass.
    """

    modality: str
    layers: tuple[int, ...]
    blocks: int
    dims: int
    pooling: str
    max_length: int | None
    compute: str
    preprocessing: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a user asked of a model. pooling None: what the folder records, else the custom of its kind."""

    modality: str
    layers: str = "last"
    pooling: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in (None, *POOLINGS):
            message = f"--pool is {self.pooling!r}; vectors of tokens are pooled by {', '.join(POOLINGS)}. Name one."
            raise UsageError(message)


def transformer_facts(model: Model, folder: str, config: Any, choice: Choice, *, is_lm: bool) -> Facts:
    """The facts of a model of transformers. config: its AutoConfig. is_lm: a causal language model.

    Raises InputError for a model that does not read the modality or is no stack of blocks over tokens, UsageError for a
    layer or pooling that it has not.
    """
    _check_modality(model, folder, config, choice.modality)
    part = _part(model, config, choice.modality)
    blocks = int(part.num_hidden_layers)
    pooling = choice.pooling or _default_pooling(model, folder, config, choice.modality)
    if pooling == "cls":
        _check_first_token(model, config, choice.modality, is_causal=is_lm or getattr(config, "is_decoder", False))
    positions = getattr(part, "max_position_embeddings", None)
    return Facts(
        modality=choice.modality,
        layers=chosen_layers(choice.layers, range(int(pooling == "cls"), blocks + 1), model),
        blocks=blocks,
        dims=int(part.hidden_size),
        pooling=pooling,
        max_length=max_length(folder, positions) if choice.modality == "text" else None,
        # As platonic-rep does; a float32 forward of a language model of billions would not fit where it was trained.
        compute="bfloat16" if is_lm else "float32",
        preprocessing="transformers tokenizer" if choice.modality == "text" else "transformers image processor, PIL",
    )


def efficientnet_facts(model: Model, choice: Choice) -> Facts:
    """The facts of EfficientNet-Lite0, which has no config. InputError for texts, UsageError for a pooled token."""
    if choice.modality != "image":
        raise InputError(f"The model {model.label} reads pictures, but captions are to be embedded. Use --of images.")
    if choice.pooling not in (None, "mean"):
        message = (
            f"The model {model.label} has no tokens to take by --pool {choice.pooling}; its one vector is the mean over"
            " places. Leave --pool out."
        )
        raise UsageError(message)
    return Facts(
        modality="image",
        layers=chosen_layers(choice.layers, [1], model),
        blocks=1,
        dims=1280,
        pooling="mean",
        max_length=None,
        compute="float32",
        preprocessing=EFFICIENTNET_PREPROCESSING,
    )


def meaning_of_layers(facts: Facts) -> str:
    """What the layers of a set are, in words for its record."""
    first = (
        "layer 0 is left out, because its first token is the same for every item"
        if facts.pooling == "cls"
        else "0: what the first block reads"
    )
    return (
        f"n < {facts.blocks}: hidden state n ({first}); {facts.blocks}: the output of the model, behind its final norm"
        " where it has one"
    )


def _check_modality(model: Model, folder: str, config: Any, modality: str) -> None:
    processors = (read_json(folder, "preprocessor_config.json"), read_json(folder, "processor_config.json"))
    reads_images = processors[0] is not None or "image_processor" in (processors[1] or {})
    reads_texts = not reads_images or config.model_type in PARTS
    if modality == "image" and not reads_images:
        message = (
            f"The model {model.label} reads texts (it has no preprocessor_config.json), but pictures are to be"
            " embedded. Name an image encoder, or --of captions."
        )
        raise InputError(message)
    has_towers = all(getattr(config, name, None) is not None for name in ("text_config", "vision_config"))
    if has_towers and config.model_type not in PARTS:
        message = (
            f"The model {model.label} is a {config.model_type} of a text and a picture tower, and how one of them alone"
            f" is run is known for {', '.join(PARTS)} only. Name another model, or import its vectors with `goodviews"
            " embed import`."
        )
        raise InputError(message)
    if modality == "text" and not reads_texts:
        message = (
            f"The model {model.label} reads pictures, but captions are to be embedded. Name a text encoder, or --of"
            " images."
        )
        raise InputError(message)


def _part(model: Model, config: Any, modality: str) -> Any:
    """The config of the tower that is run."""
    part = getattr(config, "text_config" if modality == "text" else "vision_config", None) or config
    absent = [name for name in ("num_hidden_layers", "hidden_size") if not isinstance(getattr(part, name, None), int)]
    if absent:
        message = (
            f"The config of {model.label} ({config.model_type}) has no {' and no '.join(absent)}, so it is no stack of"
            " blocks over tokens, and neither layers nor pooling mean anything for it. Name a transformer such as"
            " DINOv2 or ViT, or import vectors with `goodviews embed import`."
        )
        raise InputError(message)
    if getattr(part, "mask_ratio", None):
        message = (
            f"The model {model.label} ({config.model_type}) hides a share of {part.mask_ratio} of each picture at"
            " random, so its vectors differ from run to run. Name another model, or set mask_ratio to 0 in its"
            " config.json."
        )
        raise InputError(message)
    return part


def _default_pooling(model: Model, folder: str, config: Any, modality: str) -> str:
    if modality == "text":
        return recorded_pooling(folder) or ("last" if config.model_type.startswith("clip") else "mean")
    if config.model_type in CLS_PICTURES:
        return "cls"
    message = (
        f"Which vector of {model.label} ({config.model_type}) stands for a picture is not known: it has no token for"
        " that. Take the mean over its patches with --pool mean, if that is what you want."
    )
    raise UsageError(message)


def _check_first_token(model: Model, config: Any, modality: str, *, is_causal: bool) -> None:
    if is_causal:
        message = (
            f"The model {model.label} is causal, so its first token has seen nothing of the text and every vector would"
            " be the same. Use --pool mean or last."
        )
        raise UsageError(message)
    if modality == "image" and config.model_type not in CLS_PICTURES:
        message = (
            f"The first token of {model.label} ({config.model_type}) is not known to stand for the picture; it may be a"
            " patch in the corner. Use --pool mean."
        )
        raise UsageError(message)
