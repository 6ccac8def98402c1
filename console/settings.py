"""The settings of `steplog lag` and `steplog monitor`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from pool.connection import Connection
from pool.settings import ServiceSettings
from servicekit.process import check_address

Seconds = Annotated[float, Field(gt=0)]


class LagSettings(Connection):
    watch: bool = Field(False, description="refresh until Ctrl-C")
    every_s: Seconds = Field(2.0, description="seconds between two snapshots")
    json_: bool = Field(False, description="print each snapshot as one JSON document")
    all_: bool = Field(False, description="also show partitions without lag")
    work: bool = Field(
        True,
        description="count open trajectories and groups; this reads the topics that record them",
    )


class MonitorSettings(ServiceSettings):
    every_s: Seconds = Field(10.0, description="seconds between two snapshots of the cluster")
    host: str = Field("127.0.0.1", description="address of /health, /ready and /metrics")
    port: int = Field(
        8400, ge=0, lt=65536, description="port of /health, /ready and /metrics; 0: any free port"
    )
    insecure: bool = Field(
        False,
        description="serve them on an address other than loopback, where anybody can read them",
    )

    @model_validator(mode="after")
    def _check_address_is_safe(self) -> Self:
        danger = "shows the metrics to anybody who can reach it; set --insecure if that is intended"
        check_address(self.host, self.insecure, danger)
        return self
