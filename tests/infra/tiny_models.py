"""Tiny models with random weights, saved as the folders that users have: text encoders, language models, image encoders."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Words are spelled letter by letter, so that no text has an unknown word.
SIGNS = [*string.ascii_lowercase, *string.digits]
VOCABULARY = [*SPECIAL, *SIGNS, *(f"##{sign}" for sign in SIGNS), *string.punctuation]


def tokenizer(max_length: int = 96) -> Any:
    """A WordPiece tokenizer of letters."""
    kind: Any = transformers.BertTokenizer
    return kind(vocab={word: place for place, word in enumerate(VOCABULARY)}, model_max_length=max_length)


def save_bert(folder: Path, *, causal: bool = False, seed: int = 0, pooling: str | None = None) -> Path:
    """BERT of 2 layers, 16-d. pooling: `mean_tokens` or the like, recorded as sentence-transformers does."""
    config: Any = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=96,
        is_decoder=causal,
        use_cache=False,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = transformers.BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def save_llama(folder: Path) -> Path:
    """A causal language model of 3 layers, 16-d, with rotary positions."""
    config: Any = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=96,
        initializer_range=0.3,
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_dinov2(folder: Path) -> Path:
    """A DINOv2 of 2 layers, 16-d, for pictures of 28 px."""
    config: Any = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, initializer_range=0.3
    )
    processor: Any = transformers.BitImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}, do_center_crop=True
    )
    return _save_image_model(folder, transformers.Dinov2Model(config), processor)


def save_clip(folder: Path) -> Path:
    """A CLIP of 2 layers, 16-d, with both towers and their processors."""
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**tower, "vocab_size": len(VOCABULARY), "max_position_embeddings": 96, "eos_token_id": 3, "bos_token_id": 2}
    config: Any = transformers.CLIPConfig(
        text_config=text, vision_config={**tower, "image_size": 28, "patch_size": 14}, projection_dim=8
    )
    processor: Any = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    tokenizer().save_pretrained(folder)
    return _save_image_model(folder, transformers.CLIPModel(config), processor)


def save_config(folder: Path, config: Any) -> Path:
    """A picture model as it looks before its weights are read: config, processor, and a file of weights that are not its own."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def save_swin(folder: Path) -> Path:
    """A Swin of 2 stages, 16-d behind the second and 8-d before it, for pictures of 16 px."""
    config: Any = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2
    )
    processor: Any = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    return _save_image_model(folder, transformers.SwinModel(config), processor)


def _save_image_model(folder: Path, model: Any, processor: Any) -> Path:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
