"""The README of an exported folder: its content, its origin, and how to load it."""

from collections.abc import Mapping
from pathlib import Path

from pool.readers.scan import OffsetRange
from pool.readers.selection import SelectionSettings
from replay.settings import DatasetExportSettings
from servicekit.masking import format_settings

TEXT = """---
configs:
- config_name: default
  data_files: data-*.{format}
---
# Trajectories of {topic}

{trajectories:,} trajectories, one {per} per row.

    import datasets
    rows = datasets.load_dataset("{loader}", data_files="data-*.{format}", split="train")

* Read from `{topic}`, offsets {offsets}.
* Selected: {selected}.
* `topic`, `partition` and `offset` are the position of the trajectory's End, and `schema` is the schema
  it was written with; `step_offset` and `step_schema` are the same for a Step. `source_offset` and
  `step_source_offset` are the offsets in `steps`.
* `rewards` has the name, version, value and weight of every reward function.
* `steplog replay import` appends the rows to a log again.
"""


def write_card(
    settings: DatasetExportSettings,
    folder: Path,
    spans: Mapping[int, OffsetRange],
    trajectories: int,
) -> None:
    values = {name: getattr(settings, name) for name in SelectionSettings.model_fields}
    selection = SelectionSettings.model_validate(values)
    text = TEXT.format(
        format=settings.file_format,
        loader="parquet" if settings.file_format == "parquet" else "json",
        topic=settings.topic_name(settings.read_from),
        trajectories=trajectories,
        per=settings.per,
        offsets=", ".join(f"{n}: {s.first}-{s.end}" for n, s in spans.items() if s.first < s.end),
        selected=format_settings(selection),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
