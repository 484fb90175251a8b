"""`trainer.run.recipe`: built-in recipes are complete, agree with the paper, and come back from a record unchanged."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from infra.errors import ConfigError, UsageError
from tests.trainer.sigreg import weight_of_lambda
from trainer.run import recipe

NAMES = ("flickr-33m", "recap-109m", "tiny-cpu")


def test_the_three_recipes_are_there() -> None:
    assert tuple(recipe.built_in()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arm", recipe.ARMS)
def test_each_recipe_has_its_four_arms_and_comes_back_from_its_record(name: str, arm: str) -> None:
    chosen = recipe.load(name, arm=arm)
    assert chosen.arm == arm
    config = recipe.to_config(chosen)
    back = recipe.from_config(config)
    assert recipe.to_config(back) == config and recipe.digest(back) == recipe.digest(chosen)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_file_sets_every_key_that_decides_the_result(name: str) -> None:
    text = (resources.files("trainer") / "recipes" / f"{name}.toml").read_text()
    given = tomllib.loads(text)
    config = recipe.to_config(recipe.load(name))
    defaults = {
        "data": {"version", "validation_split", "tars"},
        "plan": {"window", "epochs", "samples", "roles", "exclude"},
        "views": {"distinct_captions"},
        "tokenizer": {"vocab_size"},
        "encoder": {"vocab_size", "causal", "pad_token_id", "length_groups"},
        "lejepa": {"direction_seed"},
        "optimizer": {"eps"},
    }
    for section, allowed in defaults.items():
        assert set(config[section]) - set(given[section]) <= allowed, section


def test_the_papers_numbers() -> None:
    flickr, recap = recipe.load("flickr-33m"), recipe.load("recap-109m")
    assert (flickr.plan.epochs, flickr.plan.batch_global, flickr.optimizer.lr) == (200, 256, 1e-4)
    assert (recap.plan.samples, recap.plan.batch_global, recap.optimizer.lr) == (900_000_000, 2048, 2e-4)
    assert flickr.lejepa.weight == pytest.approx(weight_of_lambda(0.02, views=8, batch_per_gpu=256)) == 40.96
    assert recap.lejepa.weight == pytest.approx(weight_of_lambda(0.02, views=8, batch_per_gpu=128)) == 20.48
    for each in (flickr, recap):
        assert (each.views.n_global, each.views.n_local, each.views.masked) == (2, 6, 0.15)
        assert (each.views.global_span, each.views.local_span) == ((0.5, 1.0), (0.15, 0.5))
        assert (each.lejepa.n_directions, each.lejepa.n_knots, each.optimizer.clip_norm) == (1024, 17, 1.0)


def test_arms_differ_in_what_they_say_and_nothing_else() -> None:
    good, bad = (recipe.to_config(recipe.load("tiny-cpu", arm=arm)) for arm in ("good", "bad"))
    assert bad["plan"].pop("good_fraction") == 0.0 and good["plan"].pop("good_fraction") == 1.0
    assert good.pop("arm") == "good" and bad.pop("arm") == "bad"
    assert good == bad


@pytest.mark.parametrize(
    ("sets", "arm"),
    [
        ([], "good"),
        (["objective=ntp"], "next-token"),
        (["plan.good_fraction=0.0"], "bad"),
        (["plan.good_fraction=0.3"], "good"),
    ],
)
def test_flags_choose_their_arm(sets: list[str], arm: str) -> None:
    assert recipe.load("tiny-cpu", sets=sets).arm == arm


def test_a_flag_wins_over_its_arm() -> None:
    chosen = recipe.load("tiny-cpu", arm="bad", sets=["plan.good_fraction=0.25"])
    assert (chosen.arm, chosen.plan.good_fraction) == ("bad", 0.25)


def test_what_a_digest_covers() -> None:
    base = recipe.load("tiny-cpu")
    same = recipe.load("tiny-cpu", sets=["run.threads=2", "run.log_every_steps=7", "forecast.mfu=0.1"])
    other = recipe.load("tiny-cpu", sets=["optimizer.lr=0.002"])
    assert recipe.digest(same) == recipe.digest(base) != recipe.digest(other)


def test_the_tokenizer_and_objective_complete_the_encoder() -> None:
    chosen = recipe.with_tokenizer(recipe.load("tiny-cpu", arm="next-token"), vocab_size=77, pad_token_id=3)
    assert (chosen.encoder.vocab_size, chosen.encoder.pad_token_id, chosen.encoder.causal) == (77, 3, True)
    assert chosen.encoder.projector is None
    kept = recipe.with_tokenizer(recipe.load("tiny-cpu"), vocab_size=77, pad_token_id=3)
    assert kept.encoder.projector is not None and not kept.encoder.causal


def test_a_recipe_of_ones_own_is_a_file(tmp_path: Path) -> None:
    text = (resources.files("trainer") / "recipes" / "tiny-cpu.toml").read_text().replace('"tiny-cpu"', '"mine"')
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert recipe.load(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "flickr-33"}, "Did you mean 'flickr-33m'"),
        ({"name": "nowhere.toml"}, "no recipe file nowhere.toml"),
        ({"name": "tiny-cpu", "arm": "worse"}, "has no arm 'worse'"),
    ],
)
def test_what_is_not_there_is_named(arguments: dict[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        recipe.load(**arguments)


@pytest.mark.parametrize(
    ("sets", "match"),
    [
        (["optimizer.lrr=1"], "Did you mean 'optimizer.lr'"),
        (["plan.good_fraction=half"], "plan.good_fraction"),
        (["objective=ntp", "arm=next-token", "views.n_global=2"], "next-token"),
        (["views.n_local=0", "views.n_global=1"], "needs at least 2 views of a sample"),
        (["views.max_tokens=65"], "longer than the encoder has positions"),
        (["run.keep_checkpoints=0"], "run.keep_checkpoints is 0"),
        (["plan.samples=100"], "exactly one"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sets: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        recipe.load("tiny-cpu", sets=sets)
