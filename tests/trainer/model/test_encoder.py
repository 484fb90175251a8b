"""`trainer.model.encoder` and `packing`: packed sequences get what they would get alone, and causal means causal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import BertModel

from infra.errors import ConfigError, InputError
from trainer.data.ragged import Ragged, padding_share
from trainer.model import packing
from trainer.model.encoder import SIZES, EncoderConfig, ProjectorConfig, TextEncoder, TokenBatch, bert_config

TINY = replace(
    SIZES["tiny"], width=32, heads=2, ffn=48, vocab_size=60, max_tokens=16, dropout=0.0,
    projector=ProjectorConfig(entry=8, hidden=12, output=6),
)  # fmt: skip
ROWS = st.lists(st.lists(st.integers(1, 59), min_size=1, max_size=16), min_size=1, max_size=9)


def build(config: EncoderConfig = TINY) -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(config).double()


BIDIRECTIONAL = build()
CAUSAL = build(replace(TINY, causal=True, projector=None))


def plain_hidden(encoder: TextEncoder, row: list[int]) -> Tensor:
    """Hidden states (n, D) of one sequence by transformers' own attention, without us."""
    bert = BertModel(bert_config(encoder.config), add_pooling_layer=False).double()
    bert.load_state_dict(encoder.bert.state_dict())
    assert bert.config._attn_implementation == "sdpa"
    hidden: Tensor = bert(input_ids=torch.tensor([row])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(("size", "low", "high"), [("33m", 33.2e6, 33.4e6), ("109m", 108.8e6, 109.5e6)])
def test_sizes_have_the_papers_parameters(size: str, low: float, high: float) -> None:
    with torch.device("meta"):
        encoder = TextEncoder(SIZES[size])
    assert encoder.config.vocab_size == 30_522
    assert low <= sum(p.numel() for p in encoder.bert.parameters()) <= high


@pytest.mark.parametrize("encoder", [BIDIRECTIONAL, CAUSAL], ids=["bidirectional", "causal"])
@given(rows=ROWS, groups=st.integers(1, 5))
@settings(max_examples=15)
def test_a_packed_sequence_gets_the_vector_it_gets_alone(
    encoder: TextEncoder, rows: list[list[int]], groups: int
) -> None:
    pooled = encoder.pooled(TokenBatch.from_ragged(Ragged.from_rows(rows), groups=groups))
    alone = torch.stack([plain_hidden(encoder, row).mean(0) for row in rows])
    assert torch.allclose(pooled, alone, atol=1e-12)


@pytest.mark.parametrize("encoder", [BIDIRECTIONAL, CAUSAL], ids=["bidirectional", "causal"])
def test_packing_has_the_gradients_of_single_sequences(encoder: TextEncoder) -> None:
    rows = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [14, 15, 16, 17, 18, 19, 20]]
    weights = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(batches: list[list[list[int]]], groups: int) -> list[Tensor]:
        vectors = [encoder.pooled(TokenBatch.from_ragged(Ragged.from_rows(part), groups=groups)) for part in batches]
        grads = torch.autograd.grad((torch.cat(vectors) * weights).sum(), list(encoder.bert.parameters()))
        return list(grads)

    wanted = gradients([[row] for row in rows], 1)
    assert max(float(g.abs().max()) for g in wanted) > 0.1
    for groups in (1, 2, 4):
        found = gradients([rows], groups)
        assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(found, wanted, strict=True))


def test_only_the_causal_encoder_is_blind_to_what_follows() -> None:
    for encoder, is_blind in ((CAUSAL, True), (BIDIRECTIONAL, False)):
        one = encoder.hidden(TokenBatch.from_ragged(Ragged.from_rows([[5, 6, 7, 8]])))
        other = encoder.hidden(TokenBatch.from_ragged(Ragged.from_rows([[5, 6, 7, 33]])))
        assert torch.equal(one[:3], other[:3]) is is_blind
        assert not torch.equal(one[3], other[3])


def test_padding_is_counted_in_attention_alone() -> None:
    ragged = Ragged.from_rows([[5] * n for n in (3, 9, 4, 16, 3)])
    batch = TokenBatch.from_ragged(ragged, groups=2)
    assert len(batch) == 5 and batch.n_tokens == 35
    assert batch.padding_share == pytest.approx(padding_share(ragged.lengths, 2))
    assert 0 < batch.padding_share < TokenBatch.from_ragged(ragged, groups=1).padding_share
    assert TokenBatch.from_ragged(ragged, groups=4).padding_share == 0.0


@given(ROWS)
@settings(max_examples=15)
def test_next_token_loss_is_the_sum_over_every_token_that_has_one_before_it(rows: list[list[int]]) -> None:
    loss, n_tokens = CAUSAL.next_token_loss(TokenBatch.from_ragged(Ragged.from_rows(rows), groups=3))
    table = CAUSAL.bert.embeddings.word_embeddings.weight
    wanted = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = plain_hidden(CAUSAL, row)[:-1] @ table.T
        wanted = wanted + functional.cross_entropy(logits, torch.tensor(row[1:], dtype=torch.long), reduction="sum")
    assert n_tokens == sum(len(row) - 1 for row in rows)
    assert torch.allclose(loss, wanted, rtol=1e-12)


@pytest.mark.parametrize("slices", [1, 3])
def test_next_token_gradients_are_autograds_however_the_tokens_are_sliced(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    batch = TokenBatch.from_ragged(Ragged.from_rows(rows))
    monkeypatch.setattr("trainer.model.encoder.CPU_LOGITS", 60 * 7 // slices)
    parameters = list(CAUSAL.bert.parameters())
    found = torch.autograd.grad(2.5 * CAUSAL.next_token_loss(batch)[0], parameters)
    table = CAUSAL.bert.embeddings.word_embeddings.weight
    hidden = CAUSAL.hidden(batch)
    logits = hidden[batch.followed_M] @ table.T
    targets = batch.ids_T[batch.followed_M + 1]
    wanted = torch.autograd.grad(2.5 * functional.cross_entropy(logits, targets, reduction="sum"), parameters)
    assert len(found) > 20
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(found, wanted, strict=True))


def test_the_next_token_loss_without_gradients_is_the_same() -> None:
    batch = TokenBatch.from_ragged(Ragged.from_rows([[5, 6, 7], [8, 9]]))
    with torch.no_grad():
        without = CAUSAL.next_token_loss(batch)[0]
    assert torch.equal(without, CAUSAL.next_token_loss(batch)[0])
    assert not without.requires_grad


def test_losses_and_vectors_are_float32_under_autocast() -> None:
    for config in (replace(TINY, causal=True, projector=None), TINY):
        encoder = build(config).float()
        batch = encoder.batch(Ragged.from_rows([[5, 6, 7], [8, 9]]))
        exact = encoder.pooled(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pooled = encoder.pooled(batch)
            loss = encoder.next_token_loss(batch)[0] if config.causal else encoder.project(pooled).float().sum()
        assert pooled.dtype == torch.float32 and loss.dtype == torch.float32
        assert torch.allclose(pooled, exact, atol=0.1) and not torch.equal(pooled, exact)


def test_what_an_encoder_cannot_take_is_refused_with_its_numbers() -> None:
    with pytest.raises(InputError, match="17 tokens"):
        BIDIRECTIONAL.pooled(BIDIRECTIONAL.batch(Ragged.from_rows([[5] * 17])))
    with pytest.raises(InputError, match="token 60"):
        BIDIRECTIONAL.pooled(BIDIRECTIONAL.batch(Ragged.from_rows([[5, 60]])))
    with pytest.raises(InputError, match="needs at least one token"):
        BIDIRECTIONAL.batch(Ragged.from_rows([[5], []]))
    with pytest.raises(InputError, match="0 sequences"):
        BIDIRECTIONAL.batch(Ragged.from_rows([]))
    with pytest.raises(ConfigError, match="sees the tokens"):
        BIDIRECTIONAL.next_token_loss(BIDIRECTIONAL.batch(Ragged.from_rows([[5, 6]])))
    with pytest.raises(ConfigError, match="no projector"):
        CAUSAL.project(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(InputError, match="without its packing"):
        BIDIRECTIONAL.bert(input_ids=torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    "change", [{"layers": 0}, {"heads": 5}, {"dropout": 1.0}, {"pad_token_id": 60}, {"length_groups": 0}]
)
def test_config_refuses_what_fits_no_bert(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(TINY, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="positive widths"):
        ProjectorConfig(entry=0)


def test_dropout_is_drawn_anew_in_training_only() -> None:
    encoder = build(replace(TINY, dropout=0.3))
    batch = encoder.batch(Ragged.from_rows([[5, 6, 7, 8], [9, 10]]))
    assert not torch.equal(encoder.pooled(batch), encoder.pooled(batch))
    encoder.eval()
    assert torch.equal(encoder.pooled(batch), encoder.pooled(batch))


def test_the_projector_is_the_published_one() -> None:
    with torch.device("meta"):
        encoder = TextEncoder(SIZES["33m"])
    assert encoder.projector is not None
    shapes = [tuple(p.shape) for p in encoder.projector.parameters() if p.ndim == 2]
    assert shapes == [(512, 384), (2048, 512), (2048, 2048), (512, 2048)]


def test_registering_the_attention_twice_is_harmless() -> None:
    packing.register_attention()
    packing.register_attention()
    assert np.isfinite(build().pooled(BIDIRECTIONAL.batch(Ragged.from_rows([[5, 6]]))).detach().numpy()).all()
