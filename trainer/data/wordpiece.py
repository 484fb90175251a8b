"""`corpus`: a WordPiece vocabulary trained on the captions of one split, kept in HOME/cache/tokenizers.

Invariant: the same captions and size give the same vocabulary, whatever the order, threads or process.

The trainer of the `tokenizers` package is not deterministic by itself: it numbers the pieces `##a`, `##b`, .. in the
order of a randomly seeded hash map and breaks ties between merges by those numbers (three runs on one corpus gave three
different sets of 2,000 tokens). Naming all of them beforehand, in order of their characters, leaves it nothing to
number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from catalog import schema
from infra import seeds, storage
from infra.errors import ConfigError, InputError
from infra.home import Home
from trainer.data.shardset import ShardSet
from trainer.data.tokenizer import SPECIAL, TextTokenizer, from_backend

VOCAB_SIZE: Final = 8_192
ALPHABET: Final = 1_000
"Characters with pieces of their own; rarer ones end as [UNK], else web text spends the vocabulary on them."
SCENES: Final = 200_000
"Trained on at most about so many scenes: whole shards, drawn by hash."
FORMAT: Final = "wordpiece-1"

Batches = Callable[[], Iterable[Sequence[str]]]
"Gives the texts anew each time it is called: training passes over them twice."


def train(batches: Batches, *, vocab_size: int = VOCAB_SIZE, name: str = "corpus") -> TextTokenizer:
    """Lower-cased WordPiece (Schuster and Nakajima 2012) with at most `vocab_size` tokens, special ones included.

    Raises ConfigError when the size leaves no room for words, InputError when there is no text.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts = _characters(batches, normalizer)
    if not counts:
        raise InputError(f"There is no text to train the tokenizer {name} on. Check the dataset and split.")
    alphabet = sorted(sorted(counts, key=lambda c: (-counts[c], c))[:ALPHABET])
    if vocab_size < len(SPECIAL) + 2 * len(alphabet) + 16:
        raise ConfigError(
            f"A vocabulary of {vocab_size:,} has no room for words beside {len(alphabet):,} characters, each at the"
            f" start of a word and within one. Set tokenizer.vocab_size to {2 * len(alphabet) + 1024:,} or more."
        )
    fixed = [*SPECIAL, *alphabet, *(f"##{c}" for c in alphabet)]
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    if len(alphabet) < len(counts):
        # Characters outside the alphabet would be numbered in random order again, so words break there.
        rest = "[^" + "".join(f"\\x{{{ord(c):x}}}" for c in alphabet) + "]"
        learner.normalizer = normalizers.Sequence([normalizer, normalizers.Replace(tokenizers.Regex(rest), " ")])
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    learner.train_from_iterator((list(batch) for batch in batches()), trainer)
    return from_backend(_bert(learner.get_vocab()), name=name)


def _characters(batches: Batches, normalizer: normalizers.Normalizer) -> Counter[str]:
    """How often each character stands in the normalised texts, white space aside.

    The normaliser works character by character, so it is asked once for each distinct one instead of for 100 MB of
    text.
    """
    raw = np.zeros(sys.maxunicode + 1, np.int64)
    for batch in batches():
        raw += np.bincount(np.frombuffer("".join(batch).encode("utf-32-le"), "<u4"), minlength=len(raw))
    counts: Counter[str] = Counter()
    for code in np.flatnonzero(raw).tolist():
        for c in normalizer.normalize_str(chr(code)):
            counts[c] += int(raw[code])
    return Counter({c: n for c, n in counts.items() if not c.isspace()})


def _bert(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """What `transformers.BertTokenizerFast(vocab=vocab)` builds, without importing transformers (6 s)."""
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(list(SPECIAL))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    cls, sep = vocab["[CLS]"], vocab["[SEP]"]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    return backend


# --- the captions of a version ------------------------------------------------------------------------------------


def corpus(shards: ShardSet, home: Home, *, vocab_size: int = VOCAB_SIZE) -> TextTokenizer:
    """The tokenizer of a split, trained at the first call and read from the cache later.

    All captions of the split count, whatever roles or views a run uses, so that all arms share one vocabulary.
    """
    name = f"corpus of {shards.name} {shards.split}, {vocab_size:,} tokens"
    file = f"{shards.split}-{FORMAT}-{vocab_size}-{tokenizers.__version__}.json"
    url = storage.join(home.url, "cache", "tokenizers", shards.dataset, shards.version, file)
    if storage.exists(url):
        return from_backend(tokenizers.Tokenizer.from_str(storage.read_bytes(url).decode()), name=name)
    tokenizer = train(lambda: _captions(shards), vocab_size=vocab_size, name=name)
    storage.publish(url, tokenizer.to_json())
    return tokenizer


def _captions(shards: ShardSet) -> Iterator[list[str]]:
    """Captions of whole shards, one shard at a time. The parquet is read, which has each caption once in any case."""
    order = np.argsort(seeds.mix(shards.numbers.astype(np.uint64)), kind="stable")
    enough = int(np.searchsorted(np.cumsum(shards.scenes[order]), SCENES)) + 1
    for shard in shards.numbers[order[:enough]].tolist():
        url = storage.join(shards.folder, schema.scenes_path(shards.split, shard))
        with storage.open_read(url) as file:
            table = pq.ParquetFile(file).read(columns=["captions.list.element.text"])
        yield table["captions"].combine_chunks().flatten().field("text").to_pylist()
