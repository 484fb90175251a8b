"""A tokenizer is refused when it would train on nothing, and is the same wherever it is loaded from."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import trainer
from infra.errors import ConfigError, InputError, StorageError
from infra.home import Home
from trainer.data import tokenizer, wordpiece
from trainer.data.shardset import open_shards
from trainer.data.tokenizer import TextTokenizer

REPOSITORY = Path(trainer.__file__).parents[1]
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "ke", "li", "mo", "nu", "pa", "re", "si", "to", "vu"]


def corpus(count: int = 400) -> list[str]:
    rng = random.Random(3)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(500)]
    return [" ".join(rng.choice(words) for _ in range(8)).capitalize() + "." for _ in range(count)]


TRAIN = """
import sys
sys.path.insert(0, {tests!r})
from test_tokenizer import corpus
from trainer.data import wordpiece
texts = corpus()
print(wordpiece.train(lambda: [texts[i:i + 50] for i in range(0, 400, 50)], vocab_size=300).digest)
"""


def test_the_same_captions_give_the_same_vocabulary_in_any_process_order_and_threads() -> None:
    """The trainer of the `tokenizers` package alone gives another vocabulary in each process."""
    texts = corpus()
    digests = {wordpiece.train(lambda: [texts], vocab_size=300).digest}
    digests.add(wordpiece.train(lambda: [texts[:100], texts[100:]], vocab_size=300).digest)
    digests.add(wordpiece.train(lambda: [texts[::-1]], vocab_size=300).digest)
    for threads in ("1", "2"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(REPOSITORY)}
        code = TRAIN.format(tests=str(Path(__file__).parent))
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        digests.add(run.stdout.strip())
    assert len(digests) == 1


def test_a_trained_tokenizer_has_the_size_asked_for_and_lower_cases() -> None:
    texts = corpus()
    trained = wordpiece.train(lambda: [texts], vocab_size=300)
    assert trained.vocab_size == 300
    upper, lower = trained.encode([texts[0].upper()]), trained.encode([texts[0].lower()])
    assert upper.tokens.tolist() == lower.tokens.tolist()
    assert trained.special.unk not in upper.tokens
    assert len(upper.tokens) < len(texts[0])  # words and pieces, not characters


def test_rare_characters_of_web_text_do_not_eat_the_vocabulary() -> None:
    rng = random.Random(0)
    texts = ["".join(chr(rng.randint(0x3041, 0x9000)) for _ in range(6)) + " dog cat house" for _ in range(2000)]
    trained = wordpiece.train(lambda: [texts], vocab_size=2_200)
    assert 2_005 < trained.vocab_size <= 2_200  # 5 special, 1,000 characters twice, words
    assert len(trained.encode(["dog cat house"]).tokens) == 3
    assert trained.digest == wordpiece.train(lambda: [texts], vocab_size=2_200).digest
    with pytest.raises(ConfigError, match="no room for words beside 1,000 characters"):
        wordpiece.train(lambda: [texts], vocab_size=2_000)


def test_training_on_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="no text"):
        wordpiece.train(lambda: [[" "], []])


def test_a_saved_folder_loads_as_the_same_tokenizer_here_and_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = corpus()
    trained = wordpiece.train(lambda: [texts], vocab_size=300)
    trained.save(str(tmp_path / "tokenizer"))
    trained.save(str(tmp_path / "tokenizer"))  # the same one again
    loaded = tokenizer.load(str(tmp_path / "tokenizer"))
    assert loaded.digest == trained.digest
    assert loaded.special == trained.special
    assert loaded.encode(texts[:20]).tokens.tolist() == trained.encode(texts[:20]).tokens.tolist()
    stock = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    ids = stock(texts[0])["input_ids"]
    assert ids == [trained.special.cls, *trained.encode(texts[:1]).tokens.tolist(), trained.special.sep]
    other = wordpiece.train(lambda: [texts], vocab_size=200)
    with pytest.raises(StorageError, match="another tokenizer"):
        other.save(str(tmp_path / "tokenizer"))
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]  # no temporary folder stays


def test_a_tokenizer_whose_vocabulary_was_not_found_is_refused(tmp_path: Path) -> None:
    """Transformers 5 loads `vocab_file=` without an error and keeps five tokens, so all text is [UNK]."""
    from transformers import BertTokenizer

    BertTokenizer(vocab={t: i for i, t in enumerate(tokenizer.SPECIAL)}).save_pretrained(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="0 tokens beside its special ones"):
        tokenizer.load(str(tmp_path / "empty"))


def test_a_tokenizer_without_mask_is_refused(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", *map(str, range(50))])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="has no cls token"):
        tokenizer.load(str(tmp_path / "plain"))


def test_a_name_that_is_nowhere_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"Cannot load the tokenizer 'no/such-tokenizer'.*HF_HUB_OFFLINE.*`corpus`"):
        tokenizer.load("no/such-tokenizer")


def test_encoding_adds_and_cuts_nothing_whatever_the_tokenizer_was_set_to(tmp_path: Path) -> None:
    texts = corpus()
    trained = wordpiece.train(lambda: [texts], vocab_size=300)
    backend = trained.fast().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    again = TextTokenizer(backend, trained.special, name="set")
    assert again.digest == trained.digest
    plain, reset = trained.encode(texts), again.encode(texts)
    assert plain.tokens.tolist() == reset.tokens.tolist()
    assert plain.offsets.tolist() == reset.offsets.tolist()
    assert not set(plain.tokens.tolist()) & {trained.special.pad, trained.special.cls, trained.special.sep}


def test_a_text_without_tokens_becomes_one_unknown(words: TextTokenizer) -> None:
    encoded = words.encode(["a dog", "\u200b\u200d", "", "cat"])
    assert encoded.lengths.tolist()[1:3] == [1, 1]
    assert encoded.row(1).tolist() == encoded.row(2).tolist() == [words.special.unk]


characters = st.text(st.sampled_from("abdogct ,.-'\u00e9\u0301\u00a0\u200b\u2003\u72ac[]\t#AZ"), max_size=40)


@given(st.lists(st.one_of(characters, st.text(max_size=20), st.just("a [MASK] dog[SEP]")), max_size=12))
def test_encoding_distinct_words_once_gives_what_encoding_each_text_gives(
    words: TextTokenizer, texts: list[str]
) -> None:
    """The short cut over spaces must be exact for any Unicode, not only for clean captions."""
    backend = Tokenizer.from_str(words.to_json().decode())
    backend.encode_special_tokens = True
    expected = [e.ids or [words.special.unk] for e in backend.encode_batch(texts, add_special_tokens=False)]
    found = words.encode(texts)
    assert [found.row(i).tolist() for i in range(len(found))] == expected
    assert not {words.special.mask, words.special.sep} & set(found.tokens.tolist())


def test_a_tokenizer_that_joins_words_over_spaces_takes_no_short_cut() -> None:
    vocab = {token: i for i, token in enumerate([*tokenizer.SPECIAL, *(f"w{i}" for i in range(40)), "w1 w2"])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    joined = tokenizer.from_backend(backend, name="joins")  # no pre-tokenizer: a text is one word
    assert joined.encode(["w1 w2", "w1"]).tokens.tolist() == [vocab["w1 w2"], vocab["w1"]]


def test_ids_are_narrow_while_the_vocabulary_fits(words: TextTokenizer) -> None:
    assert words.dtype is np.uint16
    texts = corpus()
    wide = wordpiece.train(lambda: [texts], vocab_size=300)
    wide.vocab_size = 70_000
    assert wide.dtype is np.int32


def test_the_corpus_tokenizer_of_a_version_is_trained_once(home: Home, publish: Callable[..., str]) -> None:
    folder = Path(publish([40, 30]))
    shards = open_shards(home, "tiny", "v1", "train")
    first = wordpiece.corpus(shards, home, vocab_size=150)
    for parquet in (folder / "scenes").rglob("*.parquet"):
        parquet.unlink()
    second = wordpiece.corpus(shards, home, vocab_size=150)
    assert second.digest == first.digest
    kept: list[Any] = list((Path(home.url) / "cache/tokenizers/tiny/v1").iterdir())
    assert len(kept) == 1
