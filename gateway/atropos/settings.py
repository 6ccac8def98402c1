"""The settings of the Atropos server."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from pool.core.groups import GroupRules
from pool.settings import ServiceSettings
from servicekit.process import check_address


class AtroposSettings(ServiceSettings):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, lt=65536, description="port to listen on")
    run: str = Field("default", description="the training run that groups belong to")
    max_body_bytes: int = Field(
        64 * 1024 * 1024, gt=0, description="largest request body, also when inflated"
    )
    silent_after_s: float = Field(
        60,
        gt=0,
        description="seconds of silence after which an environment is ignored in weights and "
        "minimum allocations",
    )
    max_queue: int | None = Field(
        None,
        gt=0,
        description="groups that may wait for the trainer; further posts get 503. Environments "
        "throttle themselves before that, and drop a group after three tries (default: no limit)",
    )
    train: bool = Field(
        False,
        description="groups are trained by `steplog train` of the same run, instead of a trainer that "
        "pulls batches",
    )
    serve_agents: bool = Field(
        False,
        description="also serve the groups of agents that called the gateway, of the run's channel "
        "`train`",
    )
    group_size: int = Field(
        8, gt=0, description="size of agents' groups whose Steps do not state it"
    )
    quorum: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of an agents' group that must be usable; at least 2 members",
    )
    group_deadline_s: float = Field(
        3600,
        gt=0,
        description="seconds after which an agents' group is closed with the members that it has",
    )
    drain_s: int = Field(
        10, gt=0, description="seconds that running requests have to end after SIGTERM"
    )
    keys: SecretStr | None = Field(
        None, description="API keys, as TENANT:KEY[,TENANT:KEY…]; turns authentication on"
    )
    keys_file: Path | None = Field(
        None, description="file of API keys, a line TENANT:sha256:HEX each (see `steplog key`)"
    )
    insecure: bool = Field(False, description="listen beyond loopback without keys")

    def group_rules(self) -> GroupRules:
        return GroupRules(
            group_size=self.group_size, quorum=self.quorum, deadline=self.group_deadline_s
        )

    @model_validator(mode="after")
    def _check_consumer(self) -> Self:
        if self.train and self.serve_agents:
            raise ValueError(
                "--serve-agents is for trainers that pull batches: with --train, steplog's trainer "
                "reads the groups of agents itself"
            )
        return self

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        check_address(
            self.host,
            self.insecure or self.keys is not None or self.keys_file is not None,
            "lets anybody who reaches it post groups and take batches; give keys with --keys-file, "
            "or --insecure",
        )
        return self
