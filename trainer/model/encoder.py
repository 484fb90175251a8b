"""The text encoder: a BERT of transformers, mean pooling, a projector for LeJEPA, and the next-token loss.

Invariant: the vector of a text is the mean of the last hidden states over all its tokens, [CLS] and [SEP] and [MASK]
included: what sentence-transformers' mean pooling computes from the exported folder. A causal encoder is causal
everywhere.

Shapes: N sequences, T tokens, M predicted tokens, D width, P projection, U words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import BertConfig, BertModel

from infra.errors import ConfigError, InputError
from trainer.data.ragged import Ragged
from trainer.model import packing
from trainer.model.distributed import SyncedBatchNorm1d
from trainer.model.packing import TokenBatch

__all__ = ["SIZES", "EncoderConfig", "ProjectorConfig", "TextEncoder", "TokenBatch"]

CPU_LOGITS, GPU_LOGITS = 1 << 22, 1 << 26
"Logits worked on at once, 16 MB and 256 MB in float32; all of them would be 600 MB for 256 captions."


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """Widths of the projector: `entry` -> `hidden` -> `hidden` -> `output` with BatchNorm and ReLU.

    A linear layer leads to `entry`. The defaults are those of the public LeJEPA code (algorithms.md 1).
    """

    entry: int = 512
    hidden: int = 2048
    output: int = 512

    def __post_init__(self) -> None:
        if min(self.entry, self.hidden, self.output) < 1:
            raise ConfigError(
                f"The projector is {self.entry}, {self.hidden}, {self.output} wide, but needs positive widths."
            )


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of a text encoder. Raises ConfigError for values that fit no BERT."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab_size: int = 30_522
    max_tokens: int = 512
    "Positions, special tokens included; a longer sequence is refused."
    causal: bool = False
    "Each token sees only those before it: the next-token arm."
    dropout: float = 0.1
    "Of embeddings, attention and layers alike; keep it equal across arms."
    pad_token_id: int = 0
    "The tokenizer's; its embedding is never trained."
    length_groups: int = 6
    "Blocks of like length in attention; more blocks are less padding and more kernels."
    projector: ProjectorConfig | None = field(default_factory=ProjectorConfig)
    "LeJEPA only: DistributedDataParallel refuses parameters without gradient, so a next-token encoder has none."

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name) for name in ("layers", "width", "heads", "ffn", "max_tokens", "length_groups")
        }
        small = [f"{name} = {value}" for name, value in sizes.items() if value < 1]
        if small:
            raise ConfigError(f"The encoder has {', '.join(small)}, but needs at least 1 of each. Change the recipe.")
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} does not divide into {self.heads} heads. Change one of the two.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}, but must be in [0, 1). Change the recipe.")
        if not 0 <= self.pad_token_id < self.vocab_size:
            message = f"pad_token_id {self.pad_token_id} is not one of {self.vocab_size} words. Take the tokenizer's."
            raise ConfigError(message)


SIZES: Mapping[str, EncoderConfig] = MappingProxyType(
    {
        "tiny": EncoderConfig(
            layers=2, width=128, heads=4, ffn=512, projector=ProjectorConfig(entry=128, hidden=256, output=128)
        ),
        "33m": EncoderConfig(layers=12, width=384, heads=12, ffn=1536),
        "109m": EncoderConfig(layers=12, width=768, heads=12, ffn=3072),
    }
)
"""The paper's two text encoders (33.2M and 108.9M parameters with BERT's vocabulary) and one for CPUs."""


class TextEncoder(nn.Module):
    """BERT without pooler, mean pooling, and the head of its objective. torch's global seed decides the weights."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        packing.register_attention()
        self.config = config
        self.bert = BertModel(bert_config(config), add_pooling_layer=False)
        self.bert.set_attn_implementation(packing.ATTENTION)
        self.projector = None if config.projector is None else _projector(config.width, config.projector)

    def batch(self, ragged: Ragged) -> TokenBatch:
        """Sequences laid out on the encoder's device, in the configured number of length groups."""
        return TokenBatch.from_ragged(ragged, groups=self.config.length_groups, device=self.bert.device)

    def hidden(self, batch: TokenBatch) -> Tensor:
        """Last hidden states of all tokens in the inner order of the batch, (T, D).

        Raises InputError for a sequence longer than `max_tokens` or a token outside the vocabulary.
        """
        if batch.longest > self.config.max_tokens or batch.largest_id >= self.config.vocab_size:
            raise InputError(
                f"The batch holds a sequence of {batch.longest} tokens and the token {batch.largest_id}, but this "
                f"encoder takes {self.config.max_tokens} tokens of a vocabulary of {self.config.vocab_size}. Cut the "
                "captions, or use the tokenizer that the encoder was made for."
            )
        output = self.bert(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            token_type_ids=torch.zeros_like(batch.ids_T)[None],
            packing=batch.packing,
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def pooled(self, batch: TokenBatch) -> Tensor:
        """Mean hidden state over all tokens of each sequence, (N, D), float32 at least; rows as they were given."""
        hidden_TD = self.hidden(batch)
        hidden_TD = hidden_TD.to(torch.promote_types(hidden_TD.dtype, torch.float32))
        # Unsafe means unchecked: the check of the lengths would wait for the GPU.
        sums_ND = torch.segment_reduce(hidden_TD, "sum", lengths=batch.lengths_N, unsafe=True)
        return (sums_ND / batch.lengths_N[:, None]).index_select(0, batch.restore_N)

    def project(self, pooled_ND: Tensor) -> Tensor:
        """Projections (N, P) of pooled vectors (N, D). All views go in one call: BatchNorm is over all of them.

        Raises ConfigError when the encoder has no projector.
        """
        if self.projector is None:
            raise ConfigError(
                "This encoder has no projector, which LeJEPA needs. Set `projector` in the encoder config."
            )
        projected_NP: Tensor = self.projector(pooled_ND)
        return projected_NP

    def forward(self, batch: TokenBatch) -> Tensor:
        """Pooled vectors, (N, D)."""
        return self.pooled(batch)

    def next_token_loss(self, batch: TokenBatch) -> tuple[Tensor, int]:
        """Summed cross-entropy of each token given those before it in its sequence, and the number of predicted tokens.

        Logits are hidden states times the input embedding, without bias or transform (algorithms.md 7), in float32 at
        least. Raises ConfigError when the encoder is not causal: it would see what it predicts.
        """
        if not self.config.causal:
            raise ConfigError("This encoder sees the tokens that it is to predict. Set `causal = true` in its config.")
        hidden_TD, table_UD = self.hidden(batch), self.bert.embeddings.word_embeddings.weight
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        hidden_MD = hidden_TD.index_select(0, batch.followed_M).to(dtype)
        targets_M = batch.ids_T.index_select(0, batch.followed_M + 1)
        has_grad = torch.is_grad_enabled() and (hidden_MD.requires_grad or table_UD.requires_grad)
        inputs = hidden_MD, table_UD.to(dtype), targets_M, has_grad
        loss: Tensor = _SummedCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
        return loss, len(batch.followed_M)


def bert_config(config: EncoderConfig) -> BertConfig:
    """The transformers config of the encoder."""
    return BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.ffn,
        max_position_embeddings=config.max_tokens,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        pad_token_id=config.pad_token_id,
        # Without cross-attention a BERT decoder is a BERT with a causal mask.
        is_decoder=config.causal,
        use_cache=False,
    )


def _projector(width: int, config: ProjectorConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, config.entry),
        nn.Linear(config.entry, config.hidden),
        SyncedBatchNorm1d(config.hidden),
        nn.ReLU(),
        nn.Linear(config.hidden, config.hidden),
        SyncedBatchNorm1d(config.hidden),
        nn.ReLU(),
        nn.Linear(config.hidden, config.output),
    )


class _SummedCrossEntropy(torch.autograd.Function):
    """sum_m log sum_u exp(h_m.e_u) - h_m.e_target, a slice of tokens at a time.

    The gradients (softmax - one-hot) e and (softmax - one-hot) h are computed beside the loss, while the logits are
    there: neither logits nor a second product are needed in the backward pass, which only scales.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, table_UD: Tensor, targets_M: Tensor, wants_grad: bool) -> Tensor:
        loss = hidden_MD.new_zeros(())
        dhidden_MD, dtable_UD = (torch.zeros_like(x) if wants_grad else None for x in (hidden_MD, table_UD))
        limit = CPU_LOGITS if hidden_MD.device.type == "cpu" else GPU_LOGITS
        step = max(1, limit // len(table_UD))
        with torch.autocast(hidden_MD.device.type, enabled=False):
            for first in range(0, len(hidden_MD), step):
                part = slice(first, first + step)
                logits_mU = hidden_MD[part] @ table_UD.T
                loss += functional.cross_entropy(logits_mU, targets_M[part], reduction="sum")
                if dhidden_MD is not None and dtable_UD is not None:
                    error_mU = logits_mU.softmax(dim=1)
                    error_mU.scatter_add_(1, targets_M[part, None], error_mU.new_full((len(error_mU), 1), -1.0))
                    dhidden_MD[part] = error_mU @ table_UD
                    dtable_UD.addmm_(error_mU.T, hidden_MD[part])
        if wants_grad:
            ctx.save_for_backward(dhidden_MD, dtable_UD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dhidden_MD, dtable_UD = ctx.saved_tensors
        return dhidden_MD * grads[0], dtable_UD * grads[0], None, None
