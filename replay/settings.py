"""The settings of `steplog replay lineage`."""

from pydantic import Field

from pool.connection import Connection


class LineageSettings(Connection):
    trajectory: str = Field(description="trajectory_uid to ask about")
    prompt: str | None = Field(
        None, description="its prompt_uid, if known: then one partition is searched, not all"
    )
    run: str | None = Field(None, description="tell of this training run only (default: of all)")
    json_: bool = Field(False, description="print all of it as one JSON document")
