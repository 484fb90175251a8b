"""Tables and views of the catalog (`scenes`, `alignments`, `leaderboard`, ...) as SQL text.

Schema `versions` holds the rows of all versions; schema `main` shows the current version of each dataset under the same
names. Invariant: the columns of scenes, rejects and states are those of `catalog.schema`, type by type.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from catalog import schema

NUMBER: Final = 3
"Of this layout; kept in the lake as the view `versions.layout`. A change of table or view raises it."

INLINE_ROWS: Final = 1000
INLINED: Final = ("datasets", "jobs", "runs", "embeddings", "alignments", "overlap_counts", "theory")
"Tables of a few narrow rows a commit: kept in the metadata database, else 1,000 commits are 4,000 tiny files."

HIDDEN: Final = frozenset({"versions.layout"})
"Not listed by `catalog tables`."

DESCRIPTIONS: Final = {
    "versions.scenes": "Scenes of all versions: one row a scene, with its captions and images.",
    "versions.rejects": "Rejects of all versions: one row a text that was not kept.",
    "versions.states": "True states of all versions, for sources that know them.",
    "versions.shards": "Shards of all versions: one row a shard, as its manifest says.",
    "main.datasets": "One row a dataset and version; is_current marks the one that plain names show.",
    "main.jobs": "One row a job: its options, what it read and kept, its cost.",
    "main.runs": "One row a training.",
    "main.metrics": "One row a number that a training reported.",
    "main.embeddings": "One row an embedding set: one model's vectors for one split.",
    "main.alignments": "One row a score between two embedding sets.",
    "main.overlap_counts": "One row a comparison of two parts and a kind: scenes and captions that both hold.",
    "main.theory": "One row a check of the theorems on finite worlds: its settings and its result.",
    "main.theory_values": "One row a number of a check of the theorems: of a point of a series.",
    "main.scenes": "Scenes of the current version of each dataset.",
    "main.rejects": "Rejects of the current version: reason, text and address.",
    "main.states": "True states of the current version, as JSON.",
    "main.shards": "Shards of the current version: counts, digests, files.",
    "main.captions": "One row a caption of the current version.",
    "main.scene_stats": "Scenes, captions and words of each dataset and split of the current version.",
    "main.leaderboard": "Alignments ranked by value among those that can be compared.",
}


def sql_type(kind: pa.DataType) -> str:
    """The DuckDB type that a parquet column of this Arrow type must be registered under."""
    if pa.types.is_struct(kind):
        return "STRUCT(" + ", ".join(f'"{f.name}" {sql_type(f.type)}' for f in kind.fields) + ")"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"{sql_type(kind.value_type)}[]"
    names = {
        pa.large_string(): "VARCHAR",
        pa.large_binary(): "BLOB",
        pa.int64(): "BIGINT",
        pa.int32(): "INTEGER",
        pa.bool_(): "BOOLEAN",
    }
    return names[kind]


SHARDS: Final = pa.schema(
    [
        ("dataset", pa.large_string()),
        ("version", pa.large_string()),
        ("split", pa.large_string()),
        ("shard", pa.int64()),
        ("seed", pa.int64()),
        ("scenes", pa.int64()),
        ("captions", pa.int64()),
        ("texts_read", pa.int64()),
        ("texts_kept", pa.int64()),
        ("rejects", pa.int64()),
        ("rejects_by_reason", pa.map_(pa.large_string(), pa.int64())),
        ("repaired", pa.int64()),
        ("scenes_without_caption", pa.int64()),
        ("captions_per_scene", pa.map_(pa.int64(), pa.int64())),
        ("bad_passes", pa.int64()),
        ("bad_repeats", pa.int64()),
        ("rows_digest", pa.large_string()),
        ("bytes", pa.int64()),
        (
            "files",
            pa.large_list(
                pa.struct(
                    [
                        ("path", pa.large_string()),
                        ("kind", pa.large_string()),
                        ("bytes", pa.int64()),
                        ("sha256", pa.large_string()),
                        ("rows", pa.int64()),
                        ("bad_pass", pa.int64()),
                    ]
                )
            ),
        ),
    ]
)
"""The shard table as Arrow: a manifest without the tar blocks."""

_SHARD_TYPES: Final = {"rejects_by_reason": "MAP(VARCHAR, BIGINT)", "captions_per_scene": "MAP(BIGINT, BIGINT)"}

_COLUMNS: Final = {
    "main.datasets": """dataset VARCHAR, version VARCHAR, is_current BOOLEAN, source VARCHAR, shards BIGINT,
        scenes BIGINT, captions BIGINT, texts_read BIGINT, texts_kept BIGINT, rejects BIGINT, job_id VARCHAR,
        created_at TIMESTAMPTZ""",
    # config, inputs, rejects_by_reason: JSON. The measured columns are null when a rebuild found no older catalog.
    "main.jobs": """job_id VARCHAR, kind VARCHAR, dataset VARCHAR, version VARCHAR, config VARCHAR, inputs VARCHAR,
        code_version VARCHAR, started_at TIMESTAMPTZ, seconds DOUBLE, workers BIGINT, peak_rss_bytes BIGINT,
        shards BIGINT, scenes BIGINT, captions BIGINT, texts_read BIGINT, texts_kept BIGINT, rejects BIGINT,
        rejects_by_reason VARCHAR""",
    # dataset_versions: JSON object, dataset -> version, because a snapshot id alone does not outlive a rebuild.
    "main.runs": """run_id VARCHAR, recipe VARCHAR, objective VARCHAR, config VARCHAR, snapshot_id BIGINT,
        dataset_versions VARCHAR, plan_digest VARCHAR, code_version VARCHAR, seed BIGINT, ranks BIGINT, steps BIGINT,
        samples BIGINT, tokens BIGINT, status VARCHAR, url VARCHAR, started_at TIMESTAMPTZ, finished_at TIMESTAMPTZ""",
    "main.metrics": "run_id VARCHAR, step BIGINT, name VARCHAR, value DOUBLE, recorded_at TIMESTAMPTZ",
    # observation: captions, images or scenes. roles, layers: JSON lists. samples, tokens: of the model's training.
    "main.embeddings": """embedding_id VARCHAR, name VARCHAR, model VARCHAR, run_id VARCHAR, observation VARCHAR,
        dataset VARCHAR, version VARCHAR, split VARCHAR, roles VARCHAR, layers VARCHAR, pooling VARCHAR,
        averaging VARCHAR, max_length BIGINT, "rows" BIGINT, dims BIGINT, dtype VARCHAR, samples BIGINT, tokens BIGINT,
        config VARCHAR,
        url VARCHAR, snapshot_id BIGINT, dataset_versions VARCHAR, code_version VARCHAR, created_at TIMESTAMPTZ""",
    # low, high: bootstrap interval. ties: share of tied queries. leakage: share of evaluated scenes seen in training.
    # pairs: that a map was fitted on. direction: of retrieval. details: JSON, what has no column of its own.
    "main.alignments": """alignment_id VARCHAR, left_id VARCHAR, right_id VARCHAR, left_name VARCHAR,
        right_name VARCHAR, left_layer BIGINT, right_layer BIGINT, dataset VARCHAR, version VARCHAR, split VARCHAR,
        metric VARCHAR, map VARCHAR, value DOUBLE, low DOUBLE, high DOUBLE, chance DOUBLE, calibrated DOUBLE,
        p_value DOUBLE, k BIGINT, n BIGINT,
        ties DOUBLE, protocol VARCHAR, selection VARCHAR, leakage DOUBLE, samples BIGINT, tokens BIGINT,
        untrained_value DOUBLE, first_epoch_value DOUBLE, seed BIGINT, snapshot_id BIGINT, dataset_versions VARCHAR,
        code_version VARCHAR, created_at TIMESTAMPTZ, pairs BIGINT, direction VARCHAR, details VARCHAR""",
    # shared: things of the kind that both hold. *_known: scenes that have such a thing at all. threshold: least Jaccard
    # similarity of kind `near`. by_split: JSON, a list of scenes of both sides for each pair of splits.
    "main.overlap_counts": """overlap_id VARCHAR, kind VARCHAR, left_dataset VARCHAR, left_version VARCHAR,
        left_split VARCHAR, right_dataset VARCHAR, right_version VARCHAR, right_split VARCHAR, shared BIGINT,
        left_scenes BIGINT, left_known BIGINT, left_total BIGINT, left_share DOUBLE,
        right_scenes BIGINT, right_known BIGINT, right_total BIGINT, right_share DOUBLE,
        left_captions BIGINT, right_captions BIGINT, threshold DOUBLE, by_split VARCHAR, snapshot_id BIGINT,
        code_version VARCHAR, created_at TIMESTAMPTZ""",
    # kind: grid (closed form) or bridge (trained). config, result: JSON. point: of a series, 0, 1, ...
    "main.theory": """theory_id VARCHAR, kind VARCHAR, seed BIGINT, config VARCHAR, result VARCHAR,
        code_version VARCHAR, created_at TIMESTAMPTZ""",
    "main.theory_values": "theory_id VARCHAR, series VARCHAR, point BIGINT, name VARCHAR, value DOUBLE",
}

_ADDED: Final = {"main.alignments": {"pairs": "BIGINT", "direction": "VARCHAR", "details": "VARCHAR"}}
"Columns that an older layout lacks; they are the last of their table, so that both come out alike."


def _columns(table: pa.Schema) -> str:
    return ", ".join(f'"{f.name}" {_SHARD_TYPES.get(f.name) or sql_type(f.type)}' for f in table)


def tables() -> dict[str, str]:
    """`schema.table` -> its column list, in order of creation."""
    arrow = {**schema.SCHEMAS, "shards": SHARDS}
    return {**{f"versions.{name}": _columns(columns) for name, columns in arrow.items()}, **_COLUMNS}


def _current(name: str) -> str:
    # A semi join: two current rows of one dataset would be a bug, and must still not double the scenes.
    return f"""SELECT r.* FROM versions.{name} AS r SEMI JOIN main.datasets AS d
        ON (r.dataset = d.dataset AND r.version = d.version AND d.is_current)"""


VIEWS: Final = {
    "main.scenes": _current("scenes"),
    "main.rejects": _current("rejects"),
    "main.states": _current("states"),
    "main.shards": _current("shards"),
    # unnest in the select list and not as a lateral join: a filter on role took 20 times as long there.
    "main.captions": """SELECT dataset, version, scene_key, split, c."index", c.role, c."text", c.repaired, source_id,
        source_uri FROM (SELECT dataset, version, scene_key, split, source_id, source_uri, unnest(captions) AS c
        FROM main.scenes)""",
    # Words are split at blanks, since cleaning leaves no other white space. captions_per_scene: {captions: scenes}.
    "main.scene_stats": """SELECT dataset, version, split, count(*) AS scenes, sum(n)::BIGINT AS captions,
        min(n) AS min_captions, avg(n) AS mean_captions, max(n) AS max_captions, histogram(n) AS captions_per_scene,
        sum(words) / nullif(sum(n), 0) AS words_per_caption
        FROM (SELECT dataset, version, split, len(captions) AS n,
            coalesce(list_sum([len(string_split(c."text", ' ')) FOR c IN captions]), 0) AS words FROM main.scenes)
        GROUP BY dataset, version, split""",
    # NaN sorts above every number, so it would lead the board. Scores with another n, k or selection rule have another
    # chance level; the id of a map inside `selection` is not part of the rule.
    "main.leaderboard": """SELECT rank() OVER (PARTITION BY metric, map, k, n, dataset, version, split, protocol,
        right_name, regexp_replace(selection, 'map [0-9a-f]{16} ', 'map '), pairs, direction ORDER BY value DESC)
        AS place, * FROM main.alignments WHERE isfinite(value)""",
    "versions.layout": f"SELECT {NUMBER} AS number",
}


def statements() -> list[str]:
    """What creates a new lake, or brings an older layout to this one, inside one transaction."""
    made = ["CREATE SCHEMA IF NOT EXISTS versions"]
    made += [f"CREATE TABLE IF NOT EXISTS {name} ({columns})" for name, columns in tables().items()]
    for name, added in _ADDED.items():
        made += [f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {column} {kind}" for column, kind in added.items()]
    made += [f"CREATE OR REPLACE VIEW {name} AS {query}" for name, query in VIEWS.items()]
    for name, text in DESCRIPTIONS.items():
        kind = "VIEW" if name in VIEWS else "TABLE"
        made.append(f"COMMENT ON {kind} {name} IS '{text.replace(chr(39), chr(39) * 2)}'")
    return made
