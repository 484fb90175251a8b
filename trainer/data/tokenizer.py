"""A tokenizer by Hugging Face name, folder, or trained on the captions, and the digest that names what it does.

Invariant: equal digests give equal ids for every text under one release of the `tokenizers` package; a caption has at
least one token.

A wrong file can load without an error: in transformers 5 `BertTokenizerFast(vocab_file=...)` gives five tokens, all
text is [UNK], and training on it looks healthy. So a tokenizer without [MASK] or with next to no words is refused.
"""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers

from infra import storage
from infra.errors import ConfigError, InputError, StorageError
from trainer.data.ragged import Ragged, offsets_of

MIN_WORDS: Final = 32
"Tokens beside the special ones. The corpora of our tests have more; a mis-loaded vocabulary has none."
BATCH: Final = 4_096
"Texts encoded at a time: an Encoding takes about 2 kB beside its ids."
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"Of the tokenizers trained here, with ids 0 to 4."


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids of the tokens that are not text."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class TextTokenizer:
    """Texts to ids, without special tokens and without truncation. Made by `load` or `from_backend`."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialIds, *, name: str, fast: Any = None) -> None:
        self._backend = copy.deepcopy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._fast = fast
        self.special = special
        self.name = name
        self.vocab_size = _vocab_size(self._backend)
        _refuse_useless(self._backend, special, name)
        self.digest = _digest(self._backend, special)
        self._splits_at_spaces = _splits_at_spaces(self._backend)

    @property
    def cache_name(self) -> str:
        """Names everything that decides ids: the digest and the release of the package that applies it."""
        return f"{self.digest}-{tokenizers.__version__}"

    @property
    def dtype(self) -> type[np.uint16 | np.int32]:
        """The narrowest type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    def encode(self, texts: Sequence[str] | pa.StringArray) -> Ragged:
        """Ids of each text. A text without any (only characters that the normaliser drops) becomes one [UNK].

        A special token that stands in a text as characters, such as "[MASK]", is encoded as characters.
        """
        strings = texts if isinstance(texts, pa.StringArray) else pa.array(texts, pa.string())
        if not self._splits_at_spaces:
            return _never_empty(self._encode(strings.to_pylist()), self.special.unk)
        # A shard says the same words again and again: each distinct one is encoded once, about ten times as fast.
        words = pc.split_pattern(strings, " ")
        distinct = words.flatten().dictionary_encode()
        ids = self._encode(distinct.dictionary.to_pylist()).take(distinct.indices.to_numpy())
        edges = words.offsets.to_numpy()
        return _never_empty(Ragged(tokens=ids.tokens, offsets=ids.offsets[edges - edges[0]]), self.special.unk)

    def _encode(self, texts: list[str]) -> Ragged:
        parts = []
        for start in range(0, len(texts), BATCH):
            encoded = self._backend.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
            parts.append(Ragged.from_rows([e.ids for e in encoded]))
        return Ragged.concatenate(parts)

    def to_json(self) -> bytes:
        """The tokenizer.json of the `tokenizers` package."""
        return self._backend.to_str().encode()

    def save(self, folder: str) -> None:
        """Write an ordinary Hugging Face tokenizer folder, whole or not at all; one of the same digest is left alone.

        Raises StorageError when the local folder holds another tokenizer, or cannot be written.
        """
        target = Path(storage.absolute(folder))
        if target.exists():
            if load(str(target)).digest != self.digest:
                raise StorageError(
                    f"{target} holds another tokenizer than {self.name}. Remove that folder, or choose another."
                )
            return
        temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{storage.TEMPORARY_SUFFIX}")
        try:
            self.fast().save_pretrained(str(temporary))
            os.rename(temporary, target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not target.exists():  # else another process wrote the same one meanwhile
                raise StorageError(
                    f"Cannot write the tokenizer to {target}: {error.strerror or error}. Nothing was written."
                ) from error

    def fast(self) -> Any:
        """The transformers tokenizer, for the exported encoder."""
        if self._fast is None:
            import transformers

            # Only tokenizers trained here come without one. `vocab=`, never `vocab_file=`: see the module docstring.
            self._fast = transformers.BertTokenizer(vocab=self._backend.get_vocab(), do_lower_case=True)
            if _digest(self._fast.backend_tokenizer, self.special) != self.digest:
                raise ConfigError(
                    "The installed transformers builds another tokenizer from our vocabulary than the one trained."
                    " Install transformers 5."
                )
        return self._fast


def from_backend(backend: tokenizers.Tokenizer, *, name: str) -> TextTokenizer:
    """A tokenizer trained here, with the special tokens `SPECIAL`."""
    vocab = backend.get_vocab(with_added_tokens=True)
    missing = [token for token in SPECIAL if token not in vocab]
    if missing:
        raise ConfigError(
            f"The tokenizer {name} has no {missing[0]}. Views begin with [CLS], end with [SEP] and hide words behind"
            " [MASK]."
        )
    pad, unk, cls, sep, mask = (vocab[token] for token in SPECIAL)
    return TextTokenizer(backend, SpecialIds(pad=pad, unk=unk, cls=cls, sep=sep, mask=mask), name=name)


def load(spec: str) -> TextTokenizer:
    """A tokenizer by folder or Hugging Face name (from the local cache only when HF_HUB_OFFLINE=1).

    Raises InputError when there is none, ConfigError when views cannot be made with it.
    """
    from transformers import AutoTokenizer

    try:
        fast = AutoTokenizer.from_pretrained(spec, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        offline = (
            " HF_HUB_OFFLINE is set, so only folders and models already downloaded are found."
            if os.environ.get("HF_HUB_OFFLINE")
            else ""
        )
        raise InputError(
            f"Cannot load the tokenizer {spec!r}: {reason}.{offline} Name a folder, a Hugging Face model, or `corpus`."
        ) from error
    backend = getattr(fast, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"The tokenizer {spec!r} has no fast version (tokenizer.json), which encoding whole shards needs. Choose"
            " one that has."
        )
    ids: dict[str, Any] = {
        name: getattr(fast, f"{name}_token_id", None) for name in ("pad", "unk", "cls", "sep", "mask")
    }
    missing = sorted(name for name, i in ids.items() if i is None)
    if missing:
        raise ConfigError(
            f"The tokenizer {spec!r} has no {missing[0]} token. Views begin with [CLS], end with [SEP] and hide words"
            " behind [MASK]; use a BERT-like tokenizer or `corpus`."
        )
    return TextTokenizer(backend, SpecialIds(**{k: int(v) for k, v in ids.items()}), name=spec, fast=fast)


def _splits_at_spaces(backend: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a text are those of its parts between spaces, one after another.

    True of BERT's: the normaliser looks at one character at a time, and no word reaches over a space. Not of
    SentencePiece, where a space is part of a piece.
    """
    record = orjson.loads(backend.to_str())
    kinds = [(record[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
    is_plain = all(token["special"] and " " not in token["content"] for token in record["added_tokens"])
    return is_plain and kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _never_empty(ids: Ragged, unk: int) -> Ragged:
    """The same sequences, an empty one replaced by a single `unk`."""
    is_empty = ids.lengths == 0
    if not is_empty.any():
        return ids
    tokens = np.insert(ids.tokens, ids.offsets[:-1][is_empty], unk)
    return Ragged(tokens=tokens, offsets=offsets_of(ids.lengths + is_empty))


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    # Ids can have gaps, and an embedding table needs a row up to the largest.
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _refuse_useless(backend: tokenizers.Tokenizer, special: SpecialIds, name: str) -> None:
    distinct = {special.pad, special.unk, special.cls, special.sep, special.mask}
    if len(distinct) < 5:
        raise ConfigError(
            f"The tokenizer {name!r} uses one id for two of [PAD], [UNK], [CLS], [SEP], [MASK]. A mask could not be"
            " told from an end."
        )
    words = len(set(backend.get_vocab(with_added_tokens=True).values()) - distinct)
    if words < MIN_WORDS:
        raise ConfigError(
            f"The tokenizer {name!r} has {words} tokens beside its special ones, so nearly all text would be [UNK]. Its"
            " vocabulary was not found or is broken; check the folder."
        )


def _digest(backend: tokenizers.Tokenizer, special: SpecialIds) -> str:
    """16 hex digits of sha256 over the tokenizer's own JSON and the special ids; where the files lie is not in it."""
    record = orjson.loads(backend.to_str())
    record["truncation"] = record["padding"] = None
    ids = [special.pad, special.unk, special.cls, special.sep, special.mask]
    return hashlib.sha256(orjson.dumps([record, ids], option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
