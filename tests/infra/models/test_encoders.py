"""`infra.models.encoders`: every layer and pooling against transformers itself, one text at a time; and models that must be refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home
from infra.models import encoders, registry
from infra.models.encoders import FrozenImageEncoder, FrozenTextEncoder
from infra.models.facts import Facts, meaning_of_layers
from infra.models.pictures import decode, efficientnet_pixels
from infra.models.registry import Model
from tests.infra import tiny_models

TEXTS = ["a dog", "two old men sit on a red bench", "snow", "a dog", "cats near the house", "men", "a bear", "x" * 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each tiny model, saved once."""
    makers: dict[str, Callable[[Path], Path]] = {
        "bert": tiny_models.save_bert,
        "causal": lambda path: tiny_models.save_bert(path, causal=True),
        "llama": tiny_models.save_llama,
        "dinov2": tiny_models.save_dinov2,
        "clip": tiny_models.save_clip,
    }
    root = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return root / name if (root / name).exists() else makers[name](root / name)

    return get


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(url=str(tmp_path / "home"), catalog=str(tmp_path / "home" / "catalog.sqlite"))


def found(folder: Path, modality: str = "text", **choices: Any) -> tuple[Model, Facts]:
    model = registry.find_model(str(folder), Home(url="/nowhere", catalog="/nowhere/catalog.sqlite"))
    return model, encoders.describe(model, modality=modality, **choices)


def alone(folder: Path, kind: Any, text: str) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """All hidden states and the last one, (T, D) each, of one text in a batch of its own, as transformers gives them."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder).eval()
    with torch.inference_mode():
        output = model(**tokenizer(text, return_tensors="pt", truncation=True), output_hidden_states=True)
    return [h[0].float().numpy() for h in output.hidden_states], output.last_hidden_state[0].float().numpy()


def test_all_layers_are_the_means_of_the_hidden_states_of_each_text_alone(folder: Callable[[str], Path]) -> None:
    for name in ("bert", "causal"):
        model, facts = found(folder(name), layers="all")
        vectors = FrozenTextEncoder(model, facts).embed(TEXTS, batch_tokens=40)
        assert facts.layers == (0, 1, 2) and facts.pooling == "mean"
        for row, text in enumerate(TEXTS):
            states, last = alone(folder(name), transformers.AutoModel, text)
            assert len(states) == 3
            np.testing.assert_allclose(states[2], last)
            for layer in facts.layers:
                np.testing.assert_allclose(vectors[layer][row], states[layer].mean(0), atol=2e-6)


def test_no_padding_gives_what_left_padding_with_mask_and_positions_gives(folder: Callable[[str], Path]) -> None:
    model, facts = found(folder("llama"), layers="all")
    assert (facts.compute, facts.pooling, facts.layers) == ("bfloat16", "mean", (0, 1, 2, 3))
    vectors = FrozenTextEncoder(model, facts).embed(TEXTS)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder("llama"), padding_side="left")
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    mask_BT = batch["attention_mask"]
    assert mask_BT[0, 0] == 0 and mask_BT[-1].all()
    loaded: Any = transformers.AutoModel.from_pretrained(folder("llama"), dtype=torch.bfloat16).eval()
    positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        output = loaded(
            input_ids=batch["input_ids"], attention_mask=mask_BT, position_ids=positions, output_hidden_states=True
        )
    for layer in facts.layers:
        hidden = output.last_hidden_state if layer == facts.blocks else output.hidden_states[layer]
        means = (hidden.float() * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        # bfloat16 has 8 bits: products over padded and unpadded rows may round apart by one of them.
        np.testing.assert_allclose(vectors[layer], means.numpy(), atol=0.03 * float(means.abs().max()))


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_pooling_takes_the_token_that_it_names(folder: Callable[[str], Path], pooling: str) -> None:
    model, facts = found(folder("bert"), pooling=pooling)
    vectors = FrozenTextEncoder(model, facts).embed(TEXTS)[2]
    for row, text in enumerate(TEXTS):
        _, last = alone(folder("bert"), transformers.AutoModel, text)
        wanted = {"cls": last[0], "last": last[-1], "mean": last.mean(0)}[pooling]
        np.testing.assert_allclose(vectors[row], wanted, atol=2e-6)


def test_bits_do_not_depend_on_the_thread_setting_nor_on_the_other_texts_of_a_length(
    folder: Callable[[str], Path],
) -> None:
    model, facts = found(folder("bert"))
    encoder, threads = FrozenTextEncoder(model, facts), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = encoder.embed(TEXTS)[2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(first, encoder.embed(TEXTS)[2])
    # The same two texts of one length, met in another order.
    np.testing.assert_array_equal(first[[3, 0]], encoder.embed([TEXTS[3], TEXTS[0]])[2])


def test_batches_hold_one_length_and_keep_to_the_budget(folder: Callable[[str], Path]) -> None:
    model, facts = found(folder("bert"))
    encoder = FrozenTextEncoder(model, facts)
    texts = ["abcd", "ab", "abce", "abcf", "b", "ba", "x" * 60]
    lengths = [len(ids) for ids in encoder.tokenize(texts)]
    seen: list[int] = []
    for places, _ in encoder.batches(texts, batch_tokens=13):
        here = {lengths[place] for place in places}
        assert len(here) == 1
        assert len(places) == 1 or len(places) * here.pop() <= 13
        seen += places.tolist()
    assert sorted(seen) == list(range(7))
    # 6 tokens each: two fit into 13, so three texts of that length are two batches.
    assert [len(p) for p, _ in encoder.batches(texts, batch_tokens=13)] == [1, 2, 2, 1, 1]


def test_a_causal_bert_stays_causal_and_a_lie_about_it_is_noticed(folder: Callable[[str], Path]) -> None:
    model, facts = found(folder("causal"), pooling="mean", layers="all")
    encoder = FrozenTextEncoder(model, facts)
    one, two = (encoder._model(**_inputs(text)).last_hidden_state[0, :3] for text in ("ab", "ax"))
    assert torch.equal(one[:2], two[:2]) and not torch.equal(one[2], two[2])
    with pytest.raises(UsageError, match="first token has seen nothing"):
        found(folder("causal"), pooling="cls")
    bidirectional = FrozenTextEncoder(*found(folder("bert")))._model
    with pytest.raises(IntegrityError, match="sees later tokens"):
        encoders._check_direction(_Claims(bidirectional), len(tiny_models.VOCABULARY), "cpu")


class _Claims:
    """A model that computes without a causal mask although its config says otherwise."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = type("Config", (), {"is_decoder": True})

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)


def _inputs(text: str) -> Any:
    return tiny_models.tokenizer()(text, return_tensors="pt")


def test_pooling_defaults_to_what_the_folder_records(tmp_path: Path) -> None:
    for recorded, pooling in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")):
        folder = tiny_models.save_bert(tmp_path / recorded, pooling=recorded)
        assert found(folder)[1].pooling == pooling
        assert found(folder, pooling="mean")[1].pooling == "mean"
    with pytest.raises(InputError, match=r"pooling max_tokens, but embed knows mean, cls and last.*--pool"):
        found(tiny_models.save_bert(tmp_path / "max", pooling="max_tokens"))
    folder = tiny_models.save_bert(tmp_path / "dense", pooling="mean_tokens")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="2_Dense behind the pooling"):
        found(folder)


def test_a_text_over_the_limit_is_cut_and_counted(tmp_path: Path) -> None:
    folder = tiny_models.save_bert(tmp_path / "short")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": False}))
    model, facts = found(folder)
    assert facts.max_length == 6
    encoder = FrozenTextEncoder(model, facts)
    vectors = encoder.embed(["abcd", "abcdefgh", "ab"])[2]
    assert (encoder.counted.tokens, encoder.counted.truncated, encoder.counted.unknown) == (6 + 6 + 4, 1, 0)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save_bert(tmp_path / "m")
    encoder = FrozenTextEncoder(*found(folder))
    with pytest.raises(InputError, match=r"3 of 5 words are unknown"):
        encoder.tokenize(["\u4e00 \u4e8c \u4e09 a b"])
    assert encoder.embed([])[2].shape == (0, 16)
    encoder._words = 20
    with pytest.raises(InputError, match="the model knows 20 words"):
        encoder.tokenize(["zebra"])


def test_clip_texts_use_the_end_token_and_pictures_the_normed_cls_token(folder: Callable[[str], Path]) -> None:
    model, facts = found(folder("clip"))
    assert facts.pooling == "last"
    clip: Any = transformers.CLIPModel.from_pretrained(folder("clip"))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8))
    processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(folder("clip"))
    with torch.inference_mode():
        text = clip.text_model(**_inputs("a dog")).last_hidden_state[0, -1]
        image = clip.vision_model(**processor(images=[picture], return_tensors="pt")).pooler_output[0]
    np.testing.assert_allclose(FrozenTextEncoder(model, facts).embed(["a dog"])[2][0], text, atol=1e-5)
    image_model, image_facts = found(folder("clip"), "image")
    assert image_facts.pooling == "cls"
    np.testing.assert_allclose(FrozenImageEncoder(image_model, image_facts).embed([picture])[2][0], image, atol=1e-5)


def test_dinov2_layers_are_cls_tokens_and_the_last_is_behind_the_norm(folder: Callable[[str], Path]) -> None:
    model, facts = found(folder("dinov2"), "image", layers="all")
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (33 + i, 40, 3), np.uint8)) for i in range(5)]
    vectors = FrozenImageEncoder(model, facts).embed(pictures)
    loaded: Any = transformers.AutoModel.from_pretrained(folder("dinov2"))
    processor: Any = transformers.BitImageProcessorPil.from_pretrained(folder("dinov2"))
    assert facts.layers == (1, 2) and vectors.keys() == {1, 2}
    meaning = meaning_of_layers(facts)
    assert "2: the output of the model, behind its final norm" in meaning and "layer 0 is left out" in meaning
    for row, picture in enumerate(pictures):
        with torch.inference_mode():
            output = loaded(**processor(images=[picture], return_tensors="pt"), output_hidden_states=True)
        np.testing.assert_allclose(vectors[1][row], output.hidden_states[1][0, 0], atol=1e-5)
        np.testing.assert_allclose(vectors[2][row], output.pooler_output[0], atol=1e-5)
        assert not np.allclose(vectors[2][row], output.hidden_states[2][0, 0], atol=1e-2)
    patches = found(folder("dinov2"), "image", layers="all", pooling="mean")[1]
    assert patches.layers == (0, 1, 2) and "0: what the first block reads" in meaning_of_layers(patches)


def test_a_first_token_before_the_first_block_is_the_same_for_all_and_no_layer(folder: Callable[[str], Path]) -> None:
    """Else its neighbours would be row numbers."""
    _, last, *_ = alone(folder("bert"), transformers.AutoModel, TEXTS[0])[0]
    first = [alone(folder("bert"), transformers.AutoModel, text)[0][0][0] for text in TEXTS]
    assert all(np.array_equal(vector, first[0]) for vector in first) and not np.array_equal(first[0], last[0])
    assert found(folder("bert"), layers="all", pooling="cls")[1].layers == (1, 2)
    for name, modality in (("bert", "text"), ("dinov2", "image"), ("clip", "image")):
        with pytest.raises(UsageError, match=r"--layers is '0'; model .* has layers 1 to 2"):
            found(folder(name), modality, layers="0", pooling="cls")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.ResNetConfig(), r"\(resnet\) has no num_hidden_layers and no hidden_size"),
        (transformers.ConvNextConfig(), r"\(convnext\) has no hidden_size"),
        (transformers.SiglipConfig(), "is a siglip of a text and a picture tower"),
        (transformers.ViTMAEConfig(), "hides a share of 0.75 of each picture at random"),
    ],
)
def test_a_picture_model_that_is_no_stack_of_blocks_over_tokens_gets_a_sentence(
    tmp_path: Path, config: Any, words: str
) -> None:
    folder = tiny_models.save_config(tmp_path / "m", config)
    for pooling in (None, "mean", "cls"):
        with pytest.raises(InputError, match=words):
            found(folder, "image", pooling=pooling)


def test_a_picture_model_without_a_token_for_the_picture_is_pooled_by_the_mean_that_is_asked_for(
    tmp_path: Path,
) -> None:
    folder = tiny_models.save_config(tmp_path / "m", transformers.SiglipVisionConfig(num_hidden_layers=2))
    with pytest.raises(UsageError, match=r"siglip_vision_model\) stands for a picture is not known.*--pool mean"):
        found(folder, "image")
    with pytest.raises(UsageError, match="may be a patch in the corner"):
        found(folder, "image", pooling="cls")
    assert found(folder, "image", pooling="mean")[1].layers == (2,)


def test_layers_that_differ_in_width_are_refused_and_the_last_is_embedded(tmp_path: Path) -> None:
    folder = tiny_models.save_swin(tmp_path / "swin")
    pictures = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (20, 20, 3), np.uint8)) for i in range(2)]
    vectors = FrozenImageEncoder(*found(folder, "image", pooling="mean")).embed(pictures)[2]
    loaded: Any = transformers.AutoModel.from_pretrained(folder)
    processor: Any = transformers.ViTImageProcessorPil.from_pretrained(folder)
    with torch.inference_mode():
        wanted = loaded(**processor(images=pictures, return_tensors="pt")).last_hidden_state.mean(1).numpy()
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    with pytest.raises(
        InputError, match=r"Layer 0 of the model has the shape \(2, 64, 8\); wanted are tokens of 16 dims"
    ):
        FrozenImageEncoder(*found(folder, "image", pooling="mean", layers="all")).embed(pictures)


def test_missing_weights_are_refused_and_not_drawn_at_random(tmp_path: Path) -> None:
    folder = tiny_models.save_bert(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack 1 weights of BertModel, first encoder.layer.1.output.dense.weight"):
        FrozenTextEncoder(*found(folder))


def test_models_that_do_not_fit_are_refused_before_anything_is_loaded(folder: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="reads texts"):
        found(folder("bert"), "image")
    with pytest.raises(InputError, match="reads pictures"):
        found(folder("dinov2"))
    with pytest.raises(UsageError, match="has layers 0 to 2"):
        found(folder("bert"), layers="0,3")
    with pytest.raises(UsageError, match="has layers 0 to 2"):
        found(folder("bert"), layers="first")
    with pytest.raises(UsageError, match="--pool is 'max'"):
        found(folder("bert"), pooling="max")
    assert found(folder("bert"), layers="2, 0,2")[1].layers == (0, 2)


def test_names_of_models_that_are_not_there_get_a_sentence(home: Home, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no run 'r1'"):
        registry.find_model("run:r1", home)
    with pytest.raises(UsageError, match="is not `run:ID`"):
        registry.find_model("run:r1@epoch-1", home)
    run = tmp_path / "home" / "runs" / "r1"
    tiny_models.save_bert(run / "encoder-untrained")
    (run / "encoder-untrained" / "goodviews.json").write_text(json.dumps({"record": {"samples": 0, "tokens": 0}}))
    about = {
        "run_id": "r1",
        "dataset": "toy",
        "version": "v1",
        "split": "train",
        "config": {"plan": {"roles": ["alt"]}},
    }
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="exported no last encoder. Exported are: run:r1@untrained"):
        registry.find_model("run:r1", home)
    model = registry.find_model("run:r1@untrained", home)
    assert (model.run_id, model.samples, model.tokens) == ("r1", 0, 0)
    assert model.training is not None
    assert {k: model.training[k] for k in ("dataset", "version", "split", "roles")} == {
        "dataset": "toy",
        "version": "v1",
        "split": "train",
        "roles": ["alt"],
    }
    with pytest.raises(InputError, match="Cannot get the model 'nobody/nothing' from Hugging Face"):
        registry.find_model("nobody/nothing", home)
    with pytest.raises(InputError, match="neither a folder"):
        registry.find_model("./not/there/at/all", home)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no config.json"):
        registry.find_model(str(tmp_path / "empty"), home)


def test_files_that_change_after_planning_are_noticed(tmp_path: Path) -> None:
    folder = tiny_models.save_bert(tmp_path / "m")
    model, facts = found(folder)
    tiny_models.save_bert(folder, seed=1)
    with pytest.raises(IntegrityError, match="are not those that this job began with"):
        FrozenTextEncoder(model, facts)


def test_a_pickled_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save_bert(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no .safetensors file"):
        found(folder)


def test_efficientnet_keeps_the_proportions_of_a_picture() -> None:
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 150:] = 255
    pixels = efficientnet_pixels(Image.fromarray(wide))
    assert pixels.shape == (3, 224, 224) and pixels.dtype == np.float32
    assert (pixels[0, 112, 0], pixels[0, 112, -1]) == (-127 / 128, 1.0)
    # 256 px are 100 of the picture, so the edge of 300 columns stays in the middle.
    assert abs(int((pixels[0, 112] < 0).sum()) - 112) <= 1


def test_broken_pictures_are_refused_and_others_become_rgb() -> None:
    data = io.BytesIO()
    Image.new("LA", (9, 9), (5, 100)).save(data, "PNG")
    assert decode(data.getvalue()).mode == "RGB"
    for broken in (b"", b"no picture", data.getvalue()[:40]):
        with pytest.raises(InputError, match="no picture that can be read"):
            decode(broken)
