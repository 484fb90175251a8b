"""`trainer.run.export`: other libraries compute our vectors from the folder, and the folder is whole or not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertTokenizer

from infra import storage
from infra.errors import ConfigError, ConflictError, IntegrityError, StorageError
from trainer.data.ragged import Ragged
from trainer.data.tokenizer import SPECIAL, TextTokenizer, from_backend
from trainer.model.encoder import SIZES, TextEncoder
from trainer.run.export import export_encoder

TEXTS = [
    "a dog runs",
    "the red cat sleeps under a tree near the river",
    "snow",
    "two people with hats and blue coats sit in an old boat",
    "three children jump over grass behind their house while one man walks on",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})
FILES = {
    "1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "goodviews.json",
    "model.safetensors", "modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    fast = BertTokenizer(vocab={word: i for i, word in enumerate([*SPECIAL, *WORDS])}, do_lower_case=True)
    return from_backend(fast.backend_tokenizer, name="words")


def encoder_of(tokenizer: TextTokenizer, *, causal: bool = False) -> TextEncoder:
    torch.manual_seed(0)
    config = replace(SIZES["tiny"], vocab_size=tokenizer.vocab_size, max_tokens=16, causal=causal)
    return TextEncoder(replace(config, projector=None) if causal else config).eval()


def our_vectors(encoder: TextEncoder, tokenizer: TextTokenizer, texts: list[str]) -> Tensor:
    """As in training: [CLS] span [SEP] of whole captions."""
    special, spans = tokenizer.special, tokenizer.encode(texts)
    rows = [[special.cls, *spans.row(i).tolist(), special.sep] for i in range(len(texts))]
    with torch.no_grad():
        return encoder.pooled(encoder.batch(Ragged.from_rows(rows)))


def load(folder: Path) -> Any:
    return AutoModel.from_pretrained(str(folder), add_pooling_layer=False).eval()


def automodel_vectors(folder: Path, texts: list[str]) -> Tensor:
    """Mean over tokens, as the folder's README says, by transformers alone."""
    batch = AutoTokenizer.from_pretrained(str(folder))(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = load(folder)(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    vectors: Tensor = (hidden * mask).sum(1) / mask.sum(1)
    return vectors


@pytest.mark.parametrize("causal", [False, True])
def test_automodel_computes_our_vectors(tmp_path: Path, tokenizer: TextTokenizer, causal: bool) -> None:
    encoder = encoder_of(tokenizer, causal=causal)
    records = export_encoder(encoder, tokenizer, str(tmp_path / "encoder"))
    assert set(records) == FILES
    assert records["config.json"] == storage.digest(str(tmp_path / "encoder" / "config.json"))
    found = automodel_vectors(tmp_path / "encoder", TEXTS)
    assert torch.allclose(found, our_vectors(encoder, tokenizer, TEXTS), atol=1e-5)


def test_a_causal_encoder_stays_causal_and_the_other_does_not_become_so(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    for causal in (True, False):
        folder = tmp_path / str(causal)
        export_encoder(encoder_of(tokenizer, causal=causal), tokenizer, str(folder))
        model = load(folder)
        assert model.config.is_decoder is causal and model.config._attn_implementation == "sdpa"
        with torch.no_grad():
            one, other = (model(input_ids=torch.tensor([[2, 6, 7, last]])).last_hidden_state[0] for last in (8, 9))
        assert torch.allclose(one[:3], other[:3], atol=1e-6) is causal


@pytest.mark.parametrize("causal", [False, True])
def test_sentence_transformers_computes_our_vectors(tmp_path: Path, tokenizer: TextTokenizer, causal: bool) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed: pip install sentence-transformers")
    encoder = encoder_of(tokenizer, causal=causal)
    folder = tmp_path / "encoder"
    export_encoder(encoder, tokenizer, str(folder))
    # In its own process: the package warns on import, which our tests take for errors.
    script = (
        "import json, sys; from sentence_transformers import SentenceTransformer;"
        "model = SentenceTransformer(sys.argv[1], device='cpu');"
        "texts = json.loads(sys.argv[2]);"
        "long = model.tokenize([' '.join(['dog'] * 40)])['input_ids'];"
        "print(json.dumps([model.encode(texts).tolist(), model.max_seq_length, list(long.shape)]))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(folder), json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    vectors, longest, shape = json.loads(done.stdout.splitlines()[-1])
    assert np.allclose(vectors, our_vectors(encoder, tokenizer, TEXTS).numpy(), atol=1e-5)
    assert longest == 16 and shape == [1, 16]


def test_long_texts_are_cut_where_training_stopped(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    encoder = encoder_of(tokenizer)
    export_encoder(encoder, tokenizer, str(tmp_path / "encoder"), max_tokens=8)
    found = automodel_vectors(tmp_path / "encoder", [" ".join(["dog"] * 40)])
    assert torch.allclose(found, our_vectors(encoder, tokenizer, [" ".join(["dog"] * 6)]), atol=1e-5)
    assert json.loads((tmp_path / "encoder" / "sentence_bert_config.json").read_bytes())["max_seq_length"] == 8
    with pytest.raises(ConfigError, match="max_tokens is 17"):
        export_encoder(encoder, tokenizer, str(tmp_path / "other"), max_tokens=17)


def test_the_folder_holds_no_pooler_no_projector_and_says_what_it_is(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    encoder = encoder_of(tokenizer)
    export_encoder(encoder, tokenizer, str(tmp_path / "encoder"), record={"run": "a1"})
    with safe_open(tmp_path / "encoder" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(encoder.bert.state_dict())
    about = json.loads((tmp_path / "encoder" / "goodviews.json").read_bytes())
    assert about["record"] == {"run": "a1"} and about["encoder"]["layers"] == 2
    assert os.listdir(tmp_path) == ["encoder"]


def test_equal_weights_give_equal_bytes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    first, second = (export_encoder(encoder_of(tokenizer), tokenizer, str(tmp_path / name)) for name in "ab")
    assert first == second


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    encoder, folder = encoder_of(tokenizer), tmp_path / "encoder"
    export_encoder(encoder, tokenizer, str(folder))
    with torch.no_grad():
        encoder.bert.embeddings.word_embeddings.weight[6] += 1
    export_encoder(encoder, tokenizer, str(folder))
    assert torch.allclose(automodel_vectors(folder, TEXTS), our_vectors(encoder, tokenizer, TEXTS), atol=1e-5)
    assert os.listdir(tmp_path) == ["encoder"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ConflictError, match="something else"):
        export_encoder(encoder, tokenizer, str(tmp_path / "thesis"))
    with pytest.raises(StorageError, match="stands there still"):
        export_encoder(encoder, tokenizer, str(tmp_path / "thesis" / "chapter.txt"))
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_a_failed_export_leaves_the_earlier_one(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, folder = encoder_of(tokenizer), tmp_path / "encoder"
    before = export_encoder(encoder, tokenizer, str(folder))
    publish = storage.publish

    def full_disk(url: str, parts: Any) -> Any:
        if url.endswith("config.json") and "Pooling" not in url:
            raise StorageError("The disk is full.")
        return publish(url, parts)

    monkeypatch.setattr(storage, "publish", full_disk)
    with pytest.raises(StorageError, match="disk is full"):
        export_encoder(encoder, tokenizer, str(folder))
    assert os.listdir(tmp_path) == ["encoder"]
    assert {name: storage.digest(str(folder / name)) for name in before} == before


def test_a_remote_folder_is_published_by_its_config(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    encoder = encoder_of(tokenizer)
    for _ in range(2):
        export_encoder(encoder, tokenizer, "memory://runs/a/encoder")
    memory = fsspec.filesystem("memory")
    memory.get("/runs/a/encoder", str(tmp_path / "copy"), recursive=True)
    assert torch.allclose(
        automodel_vectors(tmp_path / "copy", TEXTS), our_vectors(encoder, tokenizer, TEXTS), atol=1e-5
    )


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    encoder = encoder_of(tokenizer)
    with torch.no_grad():
        encoder.bert.embeddings.word_embeddings.weight[6, 0] = torch.nan
    with pytest.raises(IntegrityError, match="diverged"):
        export_encoder(encoder, tokenizer, str(tmp_path / "encoder"))
    assert os.listdir(tmp_path) == []


def test_another_tokenizer_than_the_encoders_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    config = replace(SIZES["tiny"], vocab_size=tokenizer.vocab_size, max_tokens=16)
    for wrong in (replace(config, vocab_size=tokenizer.vocab_size - 1), replace(config, pad_token_id=1)):
        with pytest.raises(ConfigError, match="was trained with"):
            export_encoder(TextEncoder(wrong), tokenizer, str(tmp_path / "encoder"))
