"""Export of an encoder as a Hugging Face and sentence-transformers folder, published whole or not at all.

Invariant: AutoModel, SentenceTransformer and `TextEncoder.pooled` give a text the same vector. A causal encoder stays
causal, because its config has `is_decoder`. No pooler is exported: AutoModel makes a random one, which nothing reads,
unless it is loaded with `add_pooling_layer=False`.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import safetensors.torch
import torch

from infra import config as configs
from infra import storage
from infra.errors import ConfigError, ConflictError, IntegrityError, StorageError
from infra.models.checkpoints import RECORD
from infra.storage import FileRecord
from trainer.data.tokenizer import TextTokenizer
from trainer.model.encoder import EncoderConfig, TextEncoder, bert_config

PUBLICATION = "config.json"
"Written last and removed first where folders cannot be renamed: without it no library loads the folder."


def export_encoder(
    encoder: TextEncoder,
    tokenizer: TextTokenizer,
    url: str,
    *,
    max_tokens: int | None = None,
    record: Mapping[str, Any] | None = None,
) -> dict[str, FileRecord]:
    """Publish the encoder (float32) with its tokenizer as the folder `url`; returns size and sha256 of each file.

    Replaces an earlier export. max_tokens: the longest text of the training, special tokens included; longer texts will
    be cut. record: plain values for goodviews.json. Raises ConflictError when `url` holds something else than an
    export, ConfigError when the tokenizer is not that of the encoder, IntegrityError when a weight is not finite.
    """
    limit = encoder.config.max_tokens if max_tokens is None else max_tokens
    if not 2 <= limit <= encoder.config.max_tokens:
        raise ConfigError(f"max_tokens is {limit}, but must be from 2 to {encoder.config.max_tokens}, the positions.")
    if storage.list_names(url) and not storage.exists(storage.join(url, RECORD)):
        message = f"{url} holds something else than an exported encoder. Export to another folder."
        raise ConflictError(message)
    _check_tokenizer(tokenizer, encoder.config)
    about = {"encoder": configs.to_dict(encoder.config), "max_tokens": limit, "record": dict(record or {})}
    files = {
        RECORD: _json(about),
        **_tokenizer_files(tokenizer, limit),
        **_sentence_transformers_files(encoder.config, limit),
        "README.md": _card(encoder.config).encode(),
        "model.safetensors": _weights(encoder),
        PUBLICATION: _hugging_face_config(encoder.config),
    }
    if storage.is_remote(url):
        return _publish_remote(url, files)
    return _publish_local(storage.absolute(url), files)


def _check_tokenizer(tokenizer: TextTokenizer, config: EncoderConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size or tokenizer.special.pad != config.pad_token_id:
        message = (
            f"The tokenizer has {tokenizer.vocab_size} words and pads with {tokenizer.special.pad}, the encoder has "
            f"{config.vocab_size} and pads with {config.pad_token_id}. Export the one that it was trained with."
        )
        raise ConfigError(message)
    empty = list(tokenizer.fast()("")["input_ids"])
    if empty != [tokenizer.special.cls, tokenizer.special.sep]:
        message = (
            f"The tokenizer turns an empty text into {empty}. Training put [CLS] and [SEP] around each view, so give "
            "the tokenizer a post-processor that adds both."
        )
        raise ConfigError(message)


def _weights(encoder: TextEncoder) -> bytes:
    state = {name: w.detach().to("cpu", torch.float32).contiguous() for name, w in encoder.bert.state_dict().items()}
    broken = [name for name, weight in state.items() if not bool(weight.isfinite().all())]
    if broken:
        message = (
            f"{len(broken)} of {len(state)} weights are not finite, first {broken[0]}: the training has diverged. "
            "Export an earlier checkpoint."
        )
        raise IntegrityError(message)
    return safetensors.torch.save(state, metadata={"format": "pt"})


def _hugging_face_config(config: EncoderConfig) -> bytes:
    shape = bert_config(config)
    shape.architectures = ["BertModel"]
    shape.dtype = "float32"
    return shape.to_json_string().encode()


def _tokenizer_files(tokenizer: TextTokenizer, limit: int) -> dict[str, bytes]:
    saved = copy.deepcopy(tokenizer.fast())
    saved.model_max_length = limit
    with tempfile.TemporaryDirectory(prefix="goodviews-tokenizer-") as name:
        saved.save_pretrained(name)
        return {str(p.relative_to(name)): p.read_bytes() for p in sorted(Path(name).rglob("*")) if p.is_file()}


def _sentence_transformers_files(config: EncoderConfig, limit: int) -> dict[str, bytes]:
    # Module names and keys of sentence-transformers 2, which later versions read (tried with 6.2).
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    pooling = {
        "word_embedding_dimension": config.width,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    return {
        "modules.json": _json(modules),
        "1_Pooling/config.json": _json(pooling),
        "sentence_bert_config.json": _json({"max_seq_length": limit, "do_lower_case": False}),
        "config_sentence_transformers.json": _json(
            {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        ),
    }


def _card(config: EncoderConfig) -> str:
    note = "Its attention is causal (`is_decoder`), so a text has no use for its first token alone.\n"
    mask = note if config.causal else ""
    return (
        "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\n---\n"
        f"A text encoder trained with goodviews: BERT, {config.layers} layers of {config.width}, no pooler. The vector "
        "of a text is the mean of the last hidden states over all its tokens, [CLS] and [SEP] included.\n"
        f"{mask}\n"
        "    SentenceTransformer(folder).encode(texts)\n"
        "    AutoModel.from_pretrained(folder, add_pooling_layer=False)\n"
    )


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def _publish_local(folder: str, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    parent, name = os.path.split(folder)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}{storage.TEMPORARY_SUFFIX}"
    temporary, old = (os.path.join(parent, f".{name}.{kind}-{unique}") for kind in ("new", "old"))
    try:
        records = {file: storage.publish(storage.join(temporary, file), data) for file, data in files.items()}
        _swap(temporary, folder, old if os.path.isdir(folder) else None)
        storage.sync(parent)
    except OSError as error:
        reason = error.strerror or error
        message = f"Cannot publish {folder}: {reason}. What stood there stands there still. Check the path."
        raise StorageError(message) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return records


def _swap(temporary: str, folder: str, old: str | None) -> None:
    """Rename `temporary` to `folder`. An existing folder is moved to `old` first, and back when the rename fails."""
    if old is None:
        os.rename(temporary, folder)
        return
    # Two folders cannot be swapped in one step. Between the renames the folder is missing, but never incomplete.
    os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _publish_remote(url: str, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    # An object store cannot rename. Without its config.json a half-replaced folder loads nowhere.
    storage.remove(storage.join(url, PUBLICATION))
    storage.remove_folder(url)
    return {file: storage.publish(storage.join(url, file), data) for file, data in files.items()}
