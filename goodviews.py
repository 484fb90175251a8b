"""The Python API: `import goodviews as gv`, then `gv.open(home)`, the measures, the losses and the stream.

Every public name is in `__all__`. Importing this module imports nothing heavy: torch, pyarrow and duckdb load where a
function first needs them. Functions take NumPy arrays or torch tensors (on any device) whose row i is item i.

    import goodviews as gv

    workspace = gv.open("./home")
    workspace.ingest("toyworld", settings={"source.scenes": 500}, num_cpus=0)
    workspace.sql("SELECT split, count(*) AS scenes FROM scenes GROUP BY split").df()

Legend of shapes: N items, D and E dimensions, M queries, K neighbours, V views of B samples.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from infra.errors import (
    AccountingError,
    ConfigError,
    ConflictError,
    GoodviewsError,
    InputError,
    IntegrityError,
    RejectBudgetError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd
    import pyarrow as pa
    import torch

    from catalog.report.page import Report
    from indexing.rotate.rotation import FittedMap
    from indexing.search.knn import Neighbours
    from indexing.search.text_search import Answer
    from indexing.uncertainty.calibration import Calibration
    from infra.config import Settings
    from infra.home import Home
    from pipelines.embed.job import EmbedOutcome as Embedded
    from pipelines.ingest.job import IngestOutcome as Ingested
    from trainer.model.losses import LejepaLoss, SigReg, sigreg
    from trainer.run.dataset import Views
    from trainer.run.job import Finished as Trained

    Table = npt.NDArray[Any] | torch.Tensor

__all__ = [
    "AccountingError",
    "Calibration",
    "ConfigError",
    "ConflictError",
    "FittedMap",
    "GoodviewsError",
    "InputError",
    "IntegrityError",
    "LejepaLoss",
    "Neighbours",
    "RejectBudgetError",
    "Result",
    "Score",
    "SigReg",
    "StorageError",
    "UsageError",
    "Views",
    "Workspace",
    "calibrate",
    "cka",
    "cknna",
    "exact_knn",
    "fit_rotation",
    "mutual_knn",
    "open",
    "recall_at_k",
    "sigreg",
    "svcca",
]

_LAZY: Final = {
    "Calibration": "indexing.uncertainty.calibration",
    "FittedMap": "indexing.rotate.rotation",
    "LejepaLoss": "trainer.model.losses",
    "Neighbours": "indexing.search.knn",
    "SigReg": "trainer.model.losses",
    "Views": "trainer.run.dataset",
    "sigreg": "trainer.model.losses",
}
"Public names that live in a package, and the module that each is imported from at its first use."

_PACKAGES: Final = ("catalog", "indexing", "infra", "pipelines", "trainer")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from infra.version import package_version

        return package_version()
    if name not in _LAZY:
        raise AttributeError(f"module 'goodviews' has no attribute {name!r}. Its names are {', '.join(__all__)}.")
    found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


# --- a HOME -------------------------------------------------------------------------------------------------------


def open(home: str | None = None, catalog: str | None = None) -> Workspace:
    """The datasets, runs, embedding sets and scores of one HOME, and the verbs that make them.

    home: folder or URL; None: GOODVIEWS_HOME, else ./goodviews-home. It need not exist yet.
    catalog: SQLite path or `postgres:...`; None: GOODVIEWS_CATALOG, else HOME/catalog.sqlite.
    Raises UsageError when HOME is not local and no catalog is named.

    >>> import goodviews as gv
    >>> gv.open(home).datasets.df()[["dataset", "is_current"]].to_dict("records")
    [{'dataset': 'toyworld', 'is_current': True}]
    """
    from infra.home import resolve

    return Workspace(resolve(home, catalog))


class Workspace:
    """An open HOME; made by `open`. It holds no connection and no lock: keep it, pickle it, share it between threads.

    The verbs take the options of the command of the same name (`goodviews ingest --help`), with `_` for `-`. `settings`
    stands for `--set`: a mapping of dotted keys, such as {"plan.epochs": 2}. They print nothing; `progress=True` shows
    on stderr what the command shows. They raise the errors of this module, such as `InputError`.
    """

    def __init__(self, home: Home) -> None:
        self.home = home

    def __repr__(self) -> str:
        return f"goodviews.open({self.home.url!r})"

    # --- asking ---

    def sql(self, query: str) -> Result:
        """The rows of one SELECT over the catalog, read-only like `goodviews catalog sql`.

        Raises UsageError for anything but one SELECT and for a query that DuckDB cannot bind, InputError when HOME has
        no catalog yet.

        >>> import goodviews as gv
        >>> gv.open(home).sql("SELECT count(*) AS scenes FROM scenes").to_pylist()
        [{'scenes': 60}]
        """
        from catalog.lake.queries import select_table

        return Result(arrow=select_table(self.home, query))

    @property
    def datasets(self) -> Result:
        """The table `datasets`: a row a version, with `is_current`."""
        return self.sql("SELECT * FROM datasets ORDER BY dataset, version")

    @property
    def runs(self) -> Result:
        """The table `runs`: a row a training, latest start first."""
        return self.sql("SELECT * FROM runs ORDER BY started_at DESC, run_id")

    @property
    def embeddings(self) -> Result:
        """The table `embeddings`: a row an embedding set, oldest first."""
        return self.sql("SELECT * FROM embeddings ORDER BY created_at, embedding_id")

    @property
    def leaderboard(self) -> Result:
        """The view `leaderboard`: scores ranked among those that can be compared (`place`)."""
        return self.sql("SELECT * FROM leaderboard ORDER BY metric, dataset, version, split, right_name, place")

    def scenes(self, dataset: str, split: str = "train", *, version: str | None = None) -> Iterator[pa.RecordBatch]:
        """The scenes of a split with their captions, as Arrow record batches; one batch is in memory at a time.

        version: None takes the current one. Raises InputError for an unknown dataset, version or split.

        >>> import goodviews as gv
        >>> sum(batch.num_rows for batch in gv.open(home).scenes("toyworld", "train"))
        39
        """
        from catalog.versions.scenes import scene_batches

        return scene_batches(self.home, dataset, version or self._current(dataset), split)

    def vectors(self, name: str, *, layer: int | None = None) -> tuple[list[str], npt.NDArray[np.float32]]:
        """The scene keys (N) and the vectors (N, D) of an embedding set, in the order of its keys.

        name: name or id. layer: None takes the last. A set of captions or images has a row each, so a key may repeat.
        Raises InputError for an unknown set or layer, IntegrityError when a file is not what its manifest says.

        >>> import goodviews as gv
        >>> keys, vectors = gv.open(home).vectors("run:first/toyworld/train/scenes")
        >>> len(set(keys)), vectors.shape
        (39, (39, 32))
        """
        import numpy as np

        from catalog.rows import embeddings

        record = embeddings.find(self.home, name)
        keys = embeddings.read_keys(self.home, record)["scene_key"].to_pylist()
        return keys, np.asarray(embeddings.read_layer(self.home, record, layer), np.float32)

    def _current(self, dataset: str) -> str:
        from catalog.versions.current import current_version

        return current_version(self.home, dataset)

    # --- the verbs ---

    def ingest(
        self,
        source: str,
        *,
        input: str | Sequence[str] = (),
        dataset: str | None = None,
        scenes_per_shard: int | None = None,
        views: str | None = None,
        limit: int | None = None,
        exclude: str | Sequence[str] = (),
        max_scenes_per_caption: int | None = None,
        max_reject_rate: float = 0.2,
        config: str | None = None,
        settings: Settings | None = None,
        address: str | None = None,
        num_cpus: int | None = None,
        progress: bool = False,
    ) -> Ingested:
        """Turn a caption set into scenes, view tars and a committed dataset version.

        Returns the counts, the version and where its files are; `was_there` when the same version was committed before.
        num_cpus: None starts Ray with all CPUs, 0 works in this process. Raises InputError for bad inputs,
        RejectBudgetError over `max_reject_rate`, UsageError or ConfigError for options.

        >>> import goodviews as gv
        >>> done = gv.open(other_home).ingest("toyworld", settings={"source.scenes": 12}, num_cpus=0)
        >>> done.scenes, done.texts_read == done.texts_kept + sum(done.rejects.values())
        (12, True)
        """
        from infra.config import to_sets
        from infra.session import open_workers
        from pipelines.ingest import commands, job

        own: Settings = {
            "scenes_per_shard": scenes_per_shard,
            "views": views,
            "limit": limit,
            "max_scenes_per_caption": max_scenes_per_caption,
            "exclude.sets": _list(exclude) or None,
        }
        request = commands.build_request(
            source, _list(input), dataset, config, [*to_sets(settings), *to_sets(own)], max_reject_rate
        )
        with _quiet(progress), open_workers(address=address, num_cpus=num_cpus) as workers:
            return job.ingest(request, self.home, workers)

    def train(
        self,
        recipe: str | None = None,
        *,
        dataset: str | None = None,
        split: str | None = None,
        roles: str | Sequence[str] = (),
        views: str | float | None = None,
        objective: str | None = None,
        arm: str | None = None,
        seed: int | None = None,
        num_workers: int = 0,
        use_gpu: bool = False,
        resume: str | None = None,
        run_id: str | None = None,
        settings: Settings | None = None,
        address: str | None = None,
        num_cpus: int | None = None,
        progress: bool = False,
    ) -> Trained:
        """Train a text encoder, or go on with a run (`resume`).

        recipe: flickr-33m, recap-109m, tiny-cpu, or a TOML file. views: "good", "bad" or the share of good samples.
        num_workers: ranks on Ray; 0 is one rank in this process. Returns the run id, what was consumed, the last
        metrics and the encoders; `embed(f"run:{run_id}", ...)` takes the last of them. Raises UsageError or ConfigError
        for options, InputError for data, ConflictError for a run that is there already.

        >>> import goodviews as gv
        >>> tiny = {"plan.epochs": 1, "plan.batch_global": 16, "plan.lanes": 4, "encoder.width": 32, "encoder.heads": 2}
        >>> tiny |= {"encoder.ffn": 64, "encoder.layers": 1, "lejepa.n_directions": 32, "tokenizer.vocab_size": 512}
        >>> gv.open(home).train("tiny-cpu", dataset="toyworld", run_id="second", settings=tiny).steps
        2
        """
        from infra.config import to_sets
        from trainer.run import job, launch
        from trainer.run import recipe as recipes

        fractions = {"good": 1.0, "bad": 0.0}
        own: Settings = {
            "data.dataset": dataset,
            "data.split": split,
            "objective": objective,
            "plan.seed": seed,
            "plan.roles": _list(roles) or None,
            "plan.good_fraction": fractions.get(views, views) if isinstance(views, str) else views,
        }
        sets = [*to_sets(own), *to_sets(settings)]
        cluster = launch.Cluster(num_workers=num_workers, use_gpu=use_gpu, address=address, num_cpus=num_cpus)
        if (resume is None) == (recipe is None) or (resume is not None and (arm or run_id)):
            raise UsageError(
                "Name a recipe, or a run to go on with (`resume`), which keeps its own recipe, arm and run_id."
            )
        with _quiet(progress):
            if resume is not None:
                return job.resume(resume, self.home, cluster, sets=sets)
            return job.start(recipes.load(str(recipe), arm=arm, sets=sets), self.home, cluster, run_id=run_id)

    def embed(
        self,
        model: str,
        *,
        dataset: str,
        split: str,
        of: str,
        images: str | Sequence[str] = (),
        layers: str = "last",
        pool: str | None = None,
        dtype: str = "float16",
        roles: str | Sequence[str] = (),
        name: str | None = None,
        batch_tokens: int = 8192,
        max_missing_rate: float = 0.0,
        address: str | None = None,
        num_cpus: int | None = None,
        progress: bool = False,
    ) -> Embedded:
        """Embed captions, images or scenes of a split with a frozen encoder.

        model: a Hugging Face name, a folder, run:ID (also @untrained, @epoch-001, @best), or efficientnet-lite0.
        dataset: `name` for the current version, or `name@version`. of: captions, images or scenes (mean of unit
        captions). num_cpus: None starts Ray with all CPUs, 0 works in this process. Returns the name and id of the set,
        and counts. Raises InputError for a model or dataset that is not there and over the budget of missing images.

        >>> import goodviews as gv
        >>> done = gv.open(home).embed("run:first", dataset="toyworld", split="train", of="scenes", num_cpus=0)
        >>> done.name, done.rows, done.dims
        ('run:first/toyworld/train/scenes', 39, 32)
        """
        from infra.session import open_workers
        from pipelines.embed import job
        from pipelines.embed.plan import EmbedConfig, plan_embedding

        title, _, version = dataset.partition("@")
        config = EmbedConfig(
            model=model,
            dataset=title,
            version=version or None,
            split=split,
            observation=of,
            images=tuple(_list(images)),
            layers=layers,
            pooling=pool,
            dtype=dtype,
            roles=tuple(_list(roles)),
            name=name,
            batch_tokens=batch_tokens,
            max_missing_rate=max_missing_rate,
        )
        with _quiet(progress):
            plan = plan_embedding(config, self.home)
            with open_workers(address=address, num_cpus=num_cpus) as workers:
                return job.embed(plan, None if num_cpus == 0 else workers)

    def align(
        self,
        left: str,
        right: str,
        *,
        metric: str | Sequence[str] = "mutual_knn",
        k: int = 10,
        protocol: str = "plain",
        exact_clamp: bool = False,
        left_layer: int | None = None,
        right_layer: int | None = None,
        captions: str = "mean",
        keys: str | None = None,
        against: str | None = None,
        permutations: int = 200,
        bootstrap: int = 10_000,
        seed: int = 0,
        progress: bool = False,
    ) -> list[Score]:
        """Score how alike two embedding sets are, with chance, intervals and ties; recorded in the catalog.

        left, right, against: names or ids of embedding sets. metric: one, several, or "all". With `against` the paired
        differences follow the scores. What makes a score doubtful is in `details["alarms"]`.
        Raises InputError for sets that are not there or hold too few common scenes, UsageError for options.

        >>> import goodviews as gv
        >>> name = "run:first/toyworld/train/scenes"
        >>> [score] = gv.open(home).align(name, name, k=5, permutations=20, bootstrap=100)
        >>> score.metric, score.value, score.n, round(score.chance, 3)
        ('mutual_knn', 1.0, 39, 0.132)
        """
        from indexing.align.job import ScoringConfig, score_sets
        from indexing.align.layers import ProtocolConfig
        from indexing.align.score import METRICS, AlignConfig
        from indexing.sets.joins import JoinConfig
        from indexing.uncertainty.bootstrap import BootstrapConfig
        from indexing.uncertainty.calibration import CalibrationConfig

        named = _list(metric)
        config = ScoringConfig(
            left=left,
            right=right,
            against=against,
            left_layer=left_layer,
            right_layer=right_layer,
            keys=keys,
            align=AlignConfig(
                metrics=METRICS if named == ["all"] else tuple(dict.fromkeys(named)),
                k=k,
                protocol=ProtocolConfig(name=protocol, exact_quantile=exact_clamp),
                bootstrap=BootstrapConfig(draws=bootstrap, seed=seed),
                calibration=CalibrationConfig(permutations=permutations, seed=seed),
            ),
            join=JoinConfig(captions=captions, seed=seed),
        )
        with _quiet(progress):
            return [_score(row) for row in score_sets(self.home, config)]

    def rotate(
        self,
        left: str,
        right: str,
        *,
        fit: str | None = None,
        fit_pairs: int | None = None,
        fit_share: float | None = None,
        splits: int = 20,
        map: str = "rotation",
        pairs: int | None = None,
        curve: Sequence[int] = (),
        apply: str | None = None,
        against: str | None = None,
        centre: bool = True,
        unit: bool = False,
        captions: str = "mean",
        bootstrap: int = 10_000,
        seed: int = 0,
        progress: bool = False,
    ) -> list[Score]:
        """Fit a map between two embedding sets and score what it retrieves on other scenes; recorded in the catalog.

        Exactly one of `fit` (a split), `fit_pairs` and `fit_share` says where the fit pairs come from, or `apply` names
        a saved map. Beside the map stand two controls, a random one and one fitted on shuffled pairs (`Score.map`).
        Raises InputError for sets that are not there or do not join, UsageError for options.

        >>> import goodviews as gv
        >>> name = "run:first/toyworld/train/scenes"
        >>> scores = gv.open(home).rotate(name, name, fit_share=0.5, splits=2, bootstrap=100)
        >>> sorted({score.map for score in scores}), scores[0].metric, scores[0].value > 0.9
        (['random', 'rotation', 'shuffled'], 'recall@1', True)
        """
        from indexing.rotate.job import MappingConfig, rotate_sets
        from indexing.rotate.rotation import MapConfig
        from indexing.rotate.transfer import apply_map
        from indexing.sets.joins import JoinConfig
        from indexing.uncertainty.bootstrap import BootstrapConfig

        joining, drawing = JoinConfig(captions=captions, seed=seed), BootstrapConfig(draws=bootstrap, seed=seed)
        with _quiet(progress):
            if apply is not None:
                if (fit, fit_pairs, fit_share, pairs, against) != (None,) * 5 or curve:
                    raise UsageError("`apply` scores a saved map and fits nothing. Leave out what belongs to fitting.")
                return [_score(r) for r in apply_map(self.home, apply, (left, right), joining, drawing)]
            config = MappingConfig(
                left=left,
                right=right,
                fit=fit,
                fit_pairs=fit_pairs,
                fit_share=fit_share,
                splits=splits,
                pairs=pairs,
                curve=tuple(curve),
                against=against,
                map=MapConfig(kind=map, centre=centre, unit=unit, seed=seed),
                join=joining,
                bootstrap=drawing,
            )
            return [_score(row) for row in rotate_sets(self.home, config)]

    def probe(
        self,
        set_: str,
        labels: str | Sequence[str],
        *,
        key: str = "scene_key",
        label: str = "label",
        kind: str | Sequence[str] = (),
        layer: int | None = None,
        captions: str = "mean",
        k: int = 10,
        folds: int = 5,
        bootstrap: int = 10_000,
        seed: int = 0,
        progress: bool = False,
    ) -> list[Score]:
        """Accuracy of a linear classifier and of nearest neighbours that read a label from an embedding set.

        labels: CSV or parquet files, or states:ATTRIBUTE such as states:place. kind: linear, knn; none for both.
        Raises InputError for a set or labels that are not there or share too few scenes.

        >>> import goodviews as gv
        >>> name = "run:first/toyworld/train/scenes"
        >>> scores = gv.open(home).probe(name, "states:sky", k=3, folds=2, bootstrap=100)
        >>> [score.metric for score in scores]
        ['probe_linear', 'probe_knn']
        """
        from indexing.probe.job import ProbingConfig, probe_set
        from indexing.probe.probes import KINDS, ProbeConfig
        from indexing.uncertainty.bootstrap import BootstrapConfig

        how = ProbeConfig(
            kinds=tuple(dict.fromkeys(_list(kind) or KINDS)),
            folds=folds,
            k=k,
            seed=seed,
            bootstrap=BootstrapConfig(draws=bootstrap, seed=seed),
        )
        scores = []
        with _quiet(progress):
            for source in _list(labels):
                config = ProbingConfig(
                    name=set_, labels=source, key=key, label=label, layer=layer, captions=captions, probe=how
                )
                scores += [_score(row) for row in probe_set(self.home, config)]
        return scores

    def search(
        self,
        text: str,
        in_: str,
        *,
        k: int = 10,
        layer: int | None = None,
        map_: str | None = None,
        progress: bool = False,
    ) -> Answer:
        """The k scenes that a text describes, nearest first, with their captions (`scenes` of the result).

        in_: name or id of an embedding set of texts, or of an index. map_: of `rotate`, to search a set of images.
        Raises InputError for a set that is not in the text's space.

        >>> import goodviews as gv
        >>> answer = gv.open(home).search("a boat on the sea", "run:first/toyworld/train/scenes", k=3)
        >>> len(answer.scenes), answer.exact
        (3, True)
        """
        from indexing.search.text_search import find_target, search_scenes

        with _quiet(progress):
            return search_scenes(self.home, text, find_target(self.home, in_), k=k, layer=layer, map_id=map_)

    def report(self, *, out: str | None = None, title: str | None = None, progress: bool = False) -> Report:
        """Write what the catalog holds as one HTML page, with each plot as PNG and SVG beside it; returns where it is.

        out: folder or URL; None: below HOME/reports. Raises InputError without a catalog.

        >>> import goodviews as gv
        >>> gv.open(home).report().page.endswith("index.html")
        True
        """
        from catalog.report.page import DEFAULT_TITLE, ReportConfig, write_report

        with _quiet(progress):
            return write_report(self.home, ReportConfig(out=out, title=title or DEFAULT_TITLE))


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of `align`, `rotate` or `probe`, and what it must be read with.

    low, high: ends of the 95 % bootstrap interval. chance: what says nothing scores. p_value, calibrated: against
    shuffled items. ties: share of items whose list ends in a tie. left, right: what was compared; of a paired
    difference None, and `difference` names the two systems. map, pairs, direction: of a fitted map. details: all else
    that `--json` prints.

    >>> import goodviews as gv
    >>> gv.Score(metric="cka", value=0.5, n=100).low is None
    True
    """

    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    calibrated: float | None = None
    p_value: float | None = None
    k: int | None = None
    ties: float | None = None
    left: str | None = None
    right: str | None = None
    difference: Sequence[str] | None = None
    map: str = "none"
    pairs: int | None = None
    direction: str | None = None
    protocol: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Result:
    """The rows of a query: a table of Arrow (`arrow`), and `df()` for pandas.

    It has all attributes of `pyarrow.Table` (`num_rows`, `to_pylist`, ...) and its stream protocol, so
    polars.DataFrame, pandas and DuckDB take it as it is.

    >>> import goodviews as gv
    >>> rows = gv.open(home).sql("SELECT split, count(*) AS scenes FROM scenes GROUP BY split ORDER BY split")
    >>> rows.num_rows, rows.column_names
    (3, ['split', 'scenes'])
    >>> rows.df()["scenes"].tolist()
    [8, 39, 13]
    """

    arrow: pa.Table

    def df(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame. Raises UsageError where pandas is not installed."""
        try:
            importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise UsageError("`df()` needs pandas. Run `pip install pandas`, or use the Arrow table itself.") from error
        return self.arrow.to_pandas()

    def __getattr__(self, name: str) -> Any:
        # Only what is not found otherwise; unpickling asks before `arrow` is there.
        if name == "arrow" or (name.startswith("__") and name != "__arrow_c_stream__"):
            raise AttributeError(name)
        return getattr(self.arrow, name)

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    def __getitem__(self, key: Any) -> Any:
        return self.arrow[key]

    def __repr__(self) -> str:
        return repr(self.arrow)


def _score(row: Mapping[str, Any]) -> Score:
    """The score that a row of `--json` holds."""
    own = {f.name for f in fields(Score)} - {"details"}
    known = {name: value for name, value in row.items() if name in own}
    return Score(**known, details={name: value for name, value in row.items() if name not in own})


def _list(given: str | Sequence[str]) -> list[str]:
    """One word or several, as several; the command repeats its option instead."""
    return [given] if isinstance(given, str) else list(given)


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Show progress only where it is asked for, and warnings only to a program that has set up its logging."""
    if progress:
        yield
        return
    from infra.progress import hidden

    # Python prints warnings of a logger without any handler to stderr.
    handler, loggers = logging.NullHandler(), [logging.getLogger(name) for name in _PACKAGES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with hidden():
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


# --- measures -----------------------------------------------------------------------------------------------------


def exact_knn(base: Table, *, k: int, queries: Table | None = None, exclude_self: bool | None = None) -> Neighbours:
    """The k nearest rows of `base` by exact cosine; ties go to the lower row.

    base (N, D), queries (M, D): None asks for the neighbours of the rows of `base` themselves, each without itself.
    exclude_self: whether row i is no neighbour of query i; None: only without queries. The answer does not depend on
    threads, tiles or device. Zero rows have no neighbours and are nobody's; missing places hold -1 and NaN. Raises
    InputError for rows that hold NaN or an infinity and for tables that do not fit together, UsageError for k < 1.

    >>> import goodviews as gv, numpy as np
    >>> gv.exact_knn(np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), k=1).ids_MK.ravel().tolist()
    [1, 0, 1]
    """
    from indexing.search import knn

    return knn.exact_knn(base, k=k, queries_MD=queries, exclude_self=exclude_self)


def mutual_knn(x: Table, y: Table, *, k: int = 10) -> float:
    """Mean share of the k nearest neighbours that two tables give the same items, 0 to 1.

    x (N, D), y (N, E). Neighbours by exact cosine; ties at the last place of both lists count for nothing. Independent
    tables score k / (N - 1) on average. Raises InputError if N differs or k is not in 1 .. N - 2.
    Source: Huh et al. 2024, arXiv 2405.07987.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 8))
    >>> gv.mutual_knn(x, 3 * x, k=10)
    1.0
    """
    from indexing.align import neighbours

    return neighbours.mutual_knn(_array(x), _array(y), k=k)


def cka(x: Table, y: Table, *, unbiased: bool = False) -> float:
    """Linear centred kernel alignment of the unit rows of two tables, 0 to 1; never forms an N x N matrix.

    x (N, D), y (N, E). unbiased: the estimator of HSIC that is 0 on average for independent tables (and may be
    negative); the biased one grows with D / N. Raises InputError for N < 4 or unequal N. Sources: Kornblith et al.
    2019, arXiv 1905.00414; Song et al. 2012.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(200, 4))
    >>> round(gv.cka(x, x[:, ::-1]), 4)
    1.0
    """
    from indexing.align import kernels

    return kernels.CKA(*_pair(x, y), unbiased=unbiased).value()


def cknna(x: Table, y: Table, *, k: int = 10) -> float:
    """Unbiased CKA restricted to pairs of items that are k nearest neighbours in both spaces.

    x (N, D), y (N, E). NaN where the restricted kernels of one space alone have a negative product.
    Raises InputError for k < 2, N < 4 or unequal N. Source: Huh et al. 2024, arXiv 2405.07987.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(200, 4))
    >>> round(gv.cknna(x, x, k=10), 3)
    1.0
    """
    from indexing.align import kernels
    from indexing.align.neighbours import neighbour_lists

    a, b = _pair(x, y)
    return kernels.CKNNA(a, b, (neighbour_lists(a, k=k), neighbour_lists(b, k=k))).value()


def svcca(x: Table, y: Table) -> float:
    """Mean canonical correlation of the 10 leading singular directions of two standardised tables, 0 to 1.

    x (N, D), y (N, E). Raises InputError for N < 12 or unequal N. Source: Raghu et al. 2017, arXiv 1706.05806.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(200, 4))
    >>> round(gv.svcca(x, x @ np.diag([1.0, 2.0, 3.0, 4.0])), 2) > 0.8
    True
    """
    from indexing.align import kernels

    return kernels.SVCCA(*_pair(x, y)).value()


def fit_rotation(x: Table, y: Table, *, centre: bool = True, unit: bool = False) -> FittedMap:
    """The rotation that brings the rows of x nearest to those of y: W = U V' of the thin SVD X'Y = U S V'.

    x (N, D), y (N, E); row i is one pair. `map_rows` of the result takes rows of the first space to unit rows of the
    second, `target_rows` takes rows of the second to the unit rows that they are compared with. centre: take the mean
    of the fit rows off both sides. unit: bring fit rows to length 1 after that. Raises InputError for unequal or fewer
    than 2 rows and for values that are not finite. Source: Schoenemann 1966.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 3))
    >>> turned = x @ np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> rotation = gv.fit_rotation(x, turned)
    >>> bool(np.allclose(rotation.map_rows(x), rotation.target_rows(turned)))
    True
    """
    from indexing.rotate import rotation

    return rotation.fit(_array(x), _array(y), rotation.MapConfig(centre=centre, unit=unit))


def recall_at_k(
    queries: Table,
    gallery: Table,
    *,
    k: int = 1,
    query_labels: Sequence[int] | None = None,
    gallery_labels: Sequence[int] | None = None,
) -> float:
    """Share of the queries that find one of their right ones among the k highest cosines of the gallery, 0 to 1.

    queries (M, D), gallery (G, D). Labels (M,) and (G,): a query and a row of the gallery with equal labels belong
    together; None: query i belongs to row i. Ties go against the query: a model that gives all rows the same score
    finds nothing. Chance is k / G where each query has one right row. Raises InputError for labels of another length
    and for a query without a right row.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(50, 8))
    >>> gv.recall_at_k(x, x + 0.01, k=1), gv.recall_at_k(np.ones_like(x), np.ones_like(x), k=1)
    (1.0, 0.0)
    """
    import numpy as np

    from indexing.rotate.retrieval import rank
    from indexing.scores.tables import finite_unit_rows

    if k < 1:
        raise UsageError(f"k is {k}, but must be 1 or more.")
    a, b = finite_unit_rows(_array(queries)), finite_unit_rows(_array(gallery))
    labels = [
        np.arange(len(table), dtype=np.int64) if given is None else np.asarray(given, np.int64)
        for table, given in ((a, query_labels), (b, gallery_labels))
    ]
    if a.shape[1:] != b.shape[1:] or [len(a), len(b)] != [len(one) for one in labels]:
        shapes = f"{a.shape} and {b.shape}, with {len(labels[0]):,} and {len(labels[1]):,} labels"
        raise InputError(f"Queries and gallery have shapes {shapes}; give rows of one space and a label for each.")
    return float(rank(a, b, labels[0], labels[1]).hits(k).mean())


def calibrate(
    metric: str | Callable[[Any, Any], float],
    x: Table,
    y: Table,
    *,
    k: int = 10,
    permutations: int = 200,
    alpha: float = 0.05,
    seed: int = 0,
) -> Calibration:
    """A score beside scores of shuffled items: p-value, threshold, calibrated value, mean of the shuffled.

    metric: a name (mutual_knn, cycle_knn, lcs_knn, edit_distance_knn, cka, unbiased_cka, cknna, svcca), for which
    neighbours are searched once (k); or any function of two NumPy tables whose perfect value is 1. x (N, D), y (N, E):
    the rows of y are shuffled. alpha: a score counts from the 1 - alpha quantile of the shuffled on. Raises UsageError
    for an unknown metric and for too few permutations. Source: Groeger, Wen and Brbic 2026, arXiv 2602.14486.

    >>> import goodviews as gv, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 8))
    >>> found = gv.calibrate("mutual_knn", x, x, k=5, permutations=99)
    >>> round(found.p_value, 2), found.calibrated
    (0.01, 1.0)
    """
    from indexing.align.score import permuted_values
    from indexing.uncertainty import calibration

    a, b = _pair(x, y)
    value_of = permuted_values(metric, a, b, k=k) if isinstance(metric, str) else _of_permuted(metric, a, b)
    config = calibration.CalibrationConfig(permutations=permutations, alpha=alpha, seed=seed)
    largest = float(k) if metric == "lcs_knn" else 1.0
    found = calibration.calibrate(value_of(None), value_of, len(a), config, largest=largest)
    if found is None:
        raise UsageError(
            f"The score is {value_of(None)} with {permutations} permutations, so there is nothing to compare."
        )
    return found


def _of_permuted(
    metric: Callable[[Any, Any], float], x: npt.NDArray[Any], y: npt.NDArray[Any]
) -> Callable[[npt.NDArray[np.int64] | None], float]:
    return lambda order: float(metric(x, y if order is None else y[order]))


def _pair(x: Table, y: Table) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    from indexing.scores.tables import check_rows

    a, b = _array(x), _array(y)
    check_rows(a, b)
    return a, b


def _array(values: Table) -> npt.NDArray[Any]:
    """The values as NumPy sees them; tensors leave their graph and device, and bfloat16 becomes float32."""
    from indexing.search.rows import Rows

    return Rows(values, name="table").x_ND
