"""`Views` gives the batches of our own trainer to anyone's loop: any ranks, workers, loaders, stopped or not."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

import goodviews as gv
from infra.home import resolve
from trainer.run import recipe as recipes
from trainer.run.assembly import assemble
from trainer.run.dataset import Batch, Views

SETTINGS: dict[str, Any] = {"tokenizer.vocab_size": 512, "plan.window": 8}
BATCH = 8
EPOCHS = 3
STEPS = 4
"Of an epoch."

Seen = tuple[int, int, list[int], list[bool], list[list[int]]]
"Step, epoch, places in the global batch, whether each sample is good, the tokens of each view."


def views(home: str, **options: Any) -> Views:
    """Views of the toy world under settings that make four steps an epoch."""
    settings = {**SETTINGS, **options.pop("settings", {})}
    return gv.Views(home, "toyworld", recipe="tiny-cpu", batch_global=BATCH, seed=3, settings=settings, **options)


def own(home: str, *, arm: str = "good", rank: int = 0, world: int = 1, sets: tuple[str, ...] = ()) -> list[Seen]:
    """What our own trainer would see, from its own recipe, plan and stream."""
    words = ["data.dataset=toyworld", f"plan.batch_global={BATCH}", f"plan.lanes={BATCH}", f"plan.epochs={EPOCHS}"]
    words += ["plan.seed=3", *(f"{key}={value}" for key, value in SETTINGS.items()), *sets]
    materials = assemble(recipes.load("tiny-cpu", arm=arm, sets=words), resolve(home))
    seen = []
    for batch in materials.stream(rank=rank, world=world).batches():
        rows = [batch.views.row(i).tolist() for i in range(len(batch.views))]
        seen.append((batch.step, batch.epoch, batch.places.tolist(), batch.is_good.tolist(), rows))
    assert len(seen) == EPOCHS * STEPS
    return seen


def seen(batches: Iterable[Any]) -> list[Seen]:
    """The same of batches of tensors: what the mask hides is padding."""
    found = []
    for batch in batches:
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert set(batch["input_ids"][~batch["attention_mask"].bool()].tolist()) <= {0}
        found.append((batch["step"], batch["epoch"], batch["places"].tolist(), batch["is_good"].tolist(), rows))
    return found


def passes(loader: Iterable[Batch], count: int = EPOCHS) -> Iterator[Batch]:
    """The batches of some passes, as a loop over epochs draws them."""
    for _ in range(count):
        yield from loader


# More workers than this machine has cores is what the test is about.
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_stock_loader_gives_the_batches_of_our_trainer(home: str, workers: int) -> None:
    loader = DataLoader(views(home), batch_size=None, num_workers=workers)
    assert len(loader) == STEPS
    assert seen(passes(loader)) == own(home)


@pytest.mark.parametrize(
    ("options", "arm", "sets"),
    [
        ({"arm": "bad"}, "bad", ()),
        ({"arm": "next-token"}, "next-token", ()),
        ({"arm": "caption-pair"}, "caption-pair", ()),
        ({"good_fraction": 0.5}, "good", ("plan.good_fraction=0.5",)),
        (
            {"settings": {"plan.roles": ["human"], "views.n_local": 1}},
            "good",
            ('plan.roles=["human"]', "views.n_local=1"),
        ),
    ],
)
def test_every_arm_is_that_of_our_trainer(home: str, options: dict[str, Any], arm: str, sets: tuple[str, ...]) -> None:
    made = views(home, **options)
    found = seen(passes(DataLoader(made, batch_size=None)))
    assert found == own(home, arm=arm, sets=sets)
    assert len(found[0][4]) == made.n_views * BATCH
    assert made.tokenizer.vocab_size <= 512


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_global_batches(home: str, world: int) -> None:
    for rank in range(world):
        loader = DataLoader(views(home, rank=rank, world=world), batch_size=None, num_workers=rank % 2)
        assert seen(passes(loader)) == own(home, rank=rank, world=world)


def test_workers_that_stay_and_workers_that_are_spawned_give_the_same(home: str) -> None:
    wanted = own(home)
    stays = DataLoader(views(home), batch_size=None, num_workers=2, persistent_workers=True)
    assert seen(passes(stays)) == wanted
    spawned = DataLoader(views(home), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert seen(islice(spawned, 2)) == wanted[:2]


@pytest.mark.parametrize("stop", [0, 1, STEPS, STEPS + 2, 2 * STEPS + 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_step_goes_on_under_any_loader(home: str, stop: int, workers: int) -> None:
    wanted = own(home)
    first = views(home)
    begun = list(islice(passes(DataLoader(first, batch_size=None)), stop))
    assert seen(begun) == wanted[:stop]
    state = first.state_dict()
    assert state == views(home).state_dict(stop)
    resumed = views(home)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = passes(DataLoader(resumed, batch_size=None, num_workers=workers), EPOCHS - stop // STEPS)
    assert seen(rest) == wanted[stop:]


def test_a_state_goes_on_with_other_ranks(home: str) -> None:
    begun = views(home, rank=1, world=2)
    assert len(list(islice(begun, STEPS + 1))) == STEPS
    state = begun.state_dict()
    for rank in range(4):
        resumed = views(home, rank=rank, world=4)
        resumed.load_state_dict(state)
        assert seen(passes(DataLoader(resumed, batch_size=None), 2)) == own(home, rank=rank, world=4)[STEPS:]


def test_the_main_process_does_not_guess_how_far_its_workers_are(home: str) -> None:
    made = views(home)
    batches = iter(DataLoader(made, batch_size=None, num_workers=2))
    last = next(batches)
    with pytest.raises(gv.UsageError, match="state_dict"):
        made.state_dict()
    made.load_state_dict(made.state_dict(last["step"] + 1))
    assert seen(islice(DataLoader(made, batch_size=None), 2)) == own(home)[1:3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, STEPS, STEPS + 1])
# torchdata 0.11 calls what torch 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader_stops_and_goes_on(home: str, workers: int, stop: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(views(home), batch_size=None, num_workers=workers)

    first, batches, state = loader(), [], None
    for batch in passes(first):
        batches.append(batch)
        if len(batches) == stop:
            state = first.state_dict()
            break
    second = loader()
    second.load_state_dict(state)
    wanted = own(home)
    assert seen(batches) == wanted[:stop]
    rest = passes(second, EPOCHS - (stop - 1) // STEPS)
    assert seen(islice(rest, EPOCHS * STEPS - stop)) == wanted[stop:]


def test_the_state_of_another_plan_or_number_of_workers_is_refused(home: str) -> None:
    state = views(home).state_dict(2)
    with pytest.raises(gv.ConflictError, match="under plan"):
        views(home, arm="bad").load_state_dict(state)
    resumed = views(home)
    resumed.load_state_dict({**state, "made": 1, "workers": 2})
    with pytest.raises(gv.ConflictError, match="one of 2 worker processes"):
        next(iter(resumed))


def test_settings_and_ranks_that_make_no_sense_are_refused(home: str) -> None:
    with pytest.raises(gv.ConfigError, match="views.n_locals"):
        views(home, settings={"views.n_locals": 2})
    with pytest.raises(gv.UsageError, match="Give both"):
        views(home, rank=0)
    with pytest.raises(gv.ConfigError, match="3 ranks do not divide"):
        next(iter(views(home, rank=0, world=3)))
    with pytest.raises(gv.InputError, match="toywold"):
        gv.Views(home, "toywold")
    with pytest.raises(gv.UsageError, match="has no arm 'goood'"):
        views(home, arm="goood")
    assert isinstance(pickle.dumps(views(home)), bytes)
