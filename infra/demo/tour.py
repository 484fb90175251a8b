"""The steps of the demo: command lines with a title and a reason each, from a toy world to a page.

Invariants: every step is one line that can be typed by hand; the three arms differ in their arm and in nothing else;
the name of a run holds a digest of all that decides it, so that a run found under a name has these settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infra.models import checkpoints

DATASET: Final = "toyworld"
ARMS: Final = ("good", "bad", "next-token")
PICTURE_MODEL: Final = "efficientnet-lite0"
SHARDS: Final = 4
EPOCHS: Final = 14
SHARES: Final = ("--set", "source.val=0.1", "--set", "source.test=0.2")
"Of scenes: to choose nothing on but the best next-token encoder, and to score."
TRAINING: Final = (
    "data.validation_split=val",
    "plan.batch_global=128",
    "lejepa.weight=10.24",  # lambda .02 x 4 views x 128
    "encoder.width=64",
    "encoder.ffn=256",
)
"On top of the recipe tiny-cpu, for all arms: smaller, so that three trainings take minutes."
CHECKPOINTS: Final = (checkpoints.UNTRAINED, checkpoints.FIRST_EPOCH, checkpoints.LAST)
ONE_CAPTION: Final = ("--captions", "hash")
THEORY_WORLDS: Final = 4
LABELS: Final = ("states:place", "states:sky")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """One call of `goodviews demo`."""

    home: str
    scenes: int = 3000
    epochs: int = EPOCHS
    seeds: int = 1
    num_cpus: int = 0

    @property
    def page(self) -> str:
        """Where the report is."""
        return f"{self.home.rstrip('/')}/report/index.html"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command. run_id: of the training that it starts."""

    title: str
    why: str
    command: Sequence[str]
    run_id: str | None = None


def ingest_steps(config: DemoConfig) -> list[Step]:
    """Make the world and look at it."""
    words = ["ingest", DATASET, "--set", f"source.scenes={config.scenes}", *SHARES]
    words += ["--scenes-per-shard", str(-(-config.scenes // SHARDS)), "--home", config.home]
    ingest = Step(
        title="Ingest the toy world",
        why=(
            "A world with a known state is drawn and captioned by five of twelve writers, some of them careless. Its"
            " texts are cleaned, grouped by scene, and written as parquet (for queries) and tars of good and bad views"
            " (for training). Same parameters, same bytes: run it again and nothing is written twice."
        ),
        command=[*words, "--num-cpus", str(config.num_cpus)],
    )
    return [
        ingest,
        _ask(
            config,
            "One scene",
            "The group that good views draw from: they share what is true. A bad view draws from one of these lines"
            " alone, and its writer's habits come along.",
            "SELECT scene_key, index, text FROM captions "
            "WHERE scene_key = (SELECT min(scene_key) FROM scenes WHERE split = 'train') ORDER BY index",
        ),
        _ask(
            config,
            "Rejects by reason",
            "No text vanishes: what was not kept is a row too, with its reason and its address in the source.",
            "SELECT reason, count(*) AS texts, min(text) AS example FROM rejects GROUP BY reason ORDER BY texts DESC",
        ),
    ]


def scoring_steps(config: DemoConfig, version: str) -> list[Step]:
    """All that follows once the world has a version: train, embed, score, show."""
    runs = [(arm, seed, run_id(config, version, arm, seed)) for seed in range(config.seeds) for arm in ARMS]
    # The trainings run in the background from here on: what needs none of them comes first, then what needs one.
    steps = [_embed_pictures(config), _probe(config, _pictures()), _theory(config)]
    for arm, seed, name in runs:
        steps += [_train(config, arm, seed, name), _embed_texts(config, name), _align(config, name)]
        steps += [_rotate(config, name), _probe(config, _texts(name))]
    return [*steps, _report(config), _verdict(config, version)]


def version_query(config: DemoConfig) -> list[str]:
    """The command whose answer, as JSON, tells the version of the world."""
    query = f"SELECT version FROM datasets WHERE dataset = '{DATASET}' AND is_current"
    return ["catalog", "sql", query, "--json", "--home", config.home]


def run_id(config: DemoConfig, version: str, arm: str, seed: int) -> str:
    """`demo-<digest of world and settings>-<arm>-s<seed>`."""
    return f"{_prefix(config, version)}-{arm}-s{seed}"


def _prefix(config: DemoConfig, version: str) -> str:
    content = "\n".join([version, str(config.epochs), *TRAINING])
    return f"demo-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _texts(name: str) -> str:
    return f"{checkpoints.model_name(name, checkpoints.LAST)}/{DATASET}/test/captions"


def _pictures() -> str:
    return f"{PICTURE_MODEL}/{DATASET}/test/images"


def _ask(config: DemoConfig, title: str, why: str, query: str) -> Step:
    return Step(title=title, why=why, command=["catalog", "sql", query, "--home", config.home])


_ARM_WORDS: Final = {
    "good": (
        "Each view of a sample draws its own caption of the scene, then a part of it. What two views share is the"
        " scene."
    ),
    "bad": "All views of a sample are parts of one caption. They share the scene, and the writer's wording too.",
    "next-token": (
        "The same encoder, told to guess the next word of one caption: a bad view as well, by the paper's account."
    ),
}


def _train(config: DemoConfig, arm: str, seed: int, name: str) -> Step:
    words = ["train", "--recipe", "tiny-cpu", "--arm", arm, "--dataset", DATASET, "--seed", str(seed)]
    words += ["--set", f"plan.epochs={config.epochs}", *(word for text in TRAINING for word in ("--set", text))]
    return Step(
        title=f"Train on texts alone: {arm}, seed {seed}",
        why=_ARM_WORDS[arm],
        command=[*words, "--run-id", name, "--home", config.home],
        run_id=name,
    )


def _embed(config: DemoConfig, title: str, why: str, models: Sequence[str], of: str) -> Step:
    words = ["embed", *(word for model in models for word in ("--model", model))]
    words += ["--dataset", DATASET, "--split", "test", "--of", of, "--num-cpus", str(config.num_cpus)]
    return Step(title=title, why=why, command=[*words, "--home", config.home])


def _embed_pictures(config: DemoConfig) -> Step:
    why = (
        "EfficientNet-Lite0 was trained on photographs by other people, has never read a word, and is not trained here."
        " Meanwhile the trainings of the next steps begin in the background."
    )
    return _embed(config, "Embed the pictures", why, [PICTURE_MODEL], "images")


def _embed_texts(config: DemoConfig, name: str) -> Step:
    why = (
        "Captions of scenes that no training has seen, each as one vector: by the encoder before training, after one"
        " epoch, at the end."
    )
    return _embed(
        config,
        f"Embed the captions: {name}",
        why,
        [checkpoints.model_name(name, one) for one in CHECKPOINTS],
        "captions",
    )


def _align(config: DemoConfig, name: str) -> Step:
    return Step(
        title=f"Align: {name}",
        why=(
            "Do captions and pictures of the same scenes have the same neighbours? One caption a scene is taken, drawn"
            " by hash: the mean over five writers would take their habits out for every encoder."
        ),
        command=["align", _texts(name), _pictures(), *ONE_CAPTION, "--home", config.home],
    )


def _rotate(config: DemoConfig, name: str) -> Step:
    half = ["--fit-share", "0.5", "--splits", "5", "--curve", _curve(config)]
    return Step(
        title=f"Rotate: {name}",
        why=(
            "A rotation is fitted on pairs of half of the scenes and has to find the partners of the other half. A"
            " random one and one fitted on shuffled pairs show what chance finds."
        ),
        command=["rotate", _texts(name), _pictures(), *half, *ONE_CAPTION, "--home", config.home],
    )


def _curve(config: DemoConfig) -> str:
    """A tenth and a third of the fit pairs, which are about a tenth of the scenes."""
    fit = config.scenes // 10
    return f"{max(2, fit // 10)},{max(3, fit // 3)}"


def _probe(config: DemoConfig, name: str) -> Step:
    labels = [word for label in LABELS for word in ("--labels", label)]
    return Step(
        title=f"Probe: {name}",
        why="What of the world's true state can be read from the vectors?",
        command=["probe", name, *labels, *(ONE_CAPTION if "captions" in name else ()), "--home", config.home],
    )


def _theory(config: DemoConfig) -> Step:
    return Step(
        title="Check the theorems",
        why=(
            "On worlds of 30 states everything can be computed: encoders of good views must be one rotation apart,"
            " those of bad views lose what the wording takes."
        ),
        command=["theory", "verify", "--worlds", str(THEORY_WORLDS), "--home", config.home],
    )


def _report(config: DemoConfig) -> Step:
    return Step(
        title="Report",
        why="All of it on one page: scores, what each encoder picks for a picture, trainings, data.",
        command=["report", "--out", config.page.removesuffix("/index.html"), "--home", config.home],
    )


def _verdict(config: DemoConfig, version: str) -> Step:
    prefix = _prefix(config, version)
    scored = (
        "FROM alignments AS a JOIN embeddings AS e ON a.left_id = e.embedding_id JOIN runs AS r ON e.run_id = r.run_id "
        f"WHERE a.metric = 'mutual_knn' AND r.run_id LIKE '{prefix}-%'"
    )
    query = (
        "SELECT encoder, seeds, round(score, 4) AS mutual_knn, round(low, 4) AS low, round(high, 4) AS high FROM"
        " (SELECT r.config ->> 'arm' AS encoder, count(*) AS seeds, avg(value) AS score, min(low) AS low, max(high) AS"
        f" high {scored} GROUP BY 1 UNION ALL SELECT 'untrained', count(*), avg(untrained_value), NULL, NULL {scored}"
        f" UNION ALL SELECT 'chance', NULL, avg(chance), NULL, NULL {scored}) ORDER BY score DESC"
    )
    return _ask(
        config,
        "The verdict",
        "Share of ten neighbours that captions and pictures have in common, mean over seeds; low and high are the ends"
        " of all 95 % intervals. Untrained encoders are not nothing: they average the words that they read.",
        query,
    )
