"""The settings of `steplog lag` and `steplog monitor`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.settings import ServiceSettings
from servicekit.process import check_address

Seconds = Annotated[float, Field(gt=0)]


class LagSettings(Connection):
    watch: bool = Field(False, description="look again and again until Ctrl-C")
    every_s: Seconds = Field(2.0, description="seconds between two looks")
    json_: bool = Field(False, description="print each look as one JSON document")
    all_: bool = Field(False, description="show the partitions too in which nothing waits")
    work: bool = Field(
        True, description="count open trajectories and groups, which reads their topics"
    )


class MonitorSettings(ServiceSettings):
    every_s: Seconds = Field(10.0, description="seconds between two looks at the cluster")
    host: str = Field("127.0.0.1", description="address for /health, /ready and /metrics")
    port: int = Field(8400, ge=0, lt=65536, description="port for them; 0 takes any free one")
    insecure: bool = Field(False, description="let anybody who reaches another address read them")

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        danger = "shows the metrics to anybody who reaches it; give --insecure where that is meant"
        check_address(self.host, self.insecure, danger)
        return self
