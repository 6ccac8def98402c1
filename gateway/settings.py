"""The gateway's settings."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from gateway.atropos.settings import AtroposSettings
from pool.settings import ServiceSettings
from servicekit.process import LOOPBACK

Positive = Annotated[int, Field(gt=0)]


class GatewaySettings(ServiceSettings):
    engines: tuple[str, ...] = Field((), description="vLLM servers, as http://HOST:PORT")
    engines_file: Path | None = Field(
        None, description="file with one engine per line; it is read again when it changes"
    )
    tokenizer: str = Field(description="folder of the model's tokenizer and chat template")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, lt=65536, description="port to listen on")
    also_ports: tuple[Annotated[int, Field(gt=0, lt=65536)], ...] = Field(
        (),
        description="further ports to listen on: Atropos environments that give no list of servers ask "
        "9004,9005,9006,9007",
    )
    reuse_port: bool = Field(
        False, description="share the port with other gateway processes (SO_REUSEPORT)"
    )
    run: str = Field("default", description="the training run that Steps belong to")
    group_size: Positive = Field(8, description="trajectories per group, where none is given")
    deadline_s: float = Field(
        6 * 3600, gt=0, le=5 * 24 * 3600, description="seconds until a trajectory expires"
    )
    unbound_channel: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="record calls that name no trajectory, each sample as a trajectory of its own in "
        "this channel (default: only short probes are answered)",
    )
    parse: Literal["tools", "always"] = Field(
        "tools",
        description="when the engine's parsers read an answer: for requests with tools, or always "
        "(for engines with a reasoning parser)",
    )
    max_prompt_tokens: Positive | None = Field(None, description="longest prompt that is taken")
    max_response_tokens: Positive | None = Field(
        None, description="longest response; also for requests that ask for none"
    )
    max_body_bytes: Positive = Field(8 * 1024 * 1024, description="largest request body")
    max_requests: Positive = Field(4096, description="requests at the same time, for each key")
    max_open_trajectories: Positive = Field(
        100_000, description="open trajectories, for each tenant"
    )
    max_groups: Positive | None = Field(
        None,
        description="groups that may run or wait for the trainer, (eta + 1) * B; "
        "new groups beyond it get 429",
    )
    usable_share: float = Field(
        0.5, ge=0, le=1, description="share of a group that must be usable to be trained"
    )
    engine_wait_s: float = Field(30, gt=0, description="seconds a call waits for a usable engine")
    engine_timeout_s: float = Field(600, gt=0, description="seconds an engine has for a call")
    drain_s: Positive = Field(60, description="seconds that running calls get on SIGTERM")
    keys: SecretStr | None = Field(
        None, description="API keys, as TENANT:KEY[,TENANT:KEY…]; turns authentication on"
    )
    keys_file: Path | None = Field(
        None, description="file of API keys, a line TENANT:sha256:HEX each (see `steplog key`)"
    )
    signing_secret: SecretStr | None = Field(
        None, description="signs base URLs; by default derived from the keys"
    )
    insecure: bool = Field(False, description="listen beyond loopback without keys")
    atropos: bool = Field(
        False,
        description="serve Atropos environments and trainers too, under /atropos, as `steplog atropos` "
        "does",
    )
    atropos_serve_agents: bool = Field(
        False, description="hand out groups of agents there, too: of the run's channel `train`"
    )
    atropos_max_queue: Positive | None = Field(
        None, description="groups that may wait there; further posts get 503 (default: no limit)"
    )
    reward: str | None = Field(None, description="URL of a reward worker, for /compute_reward")

    @field_validator("unbound_channel")
    @classmethod
    def _is_not_trained(cls, channel: str | None) -> str | None:
        if channel == "train":
            raise ValueError("such calls have no reward and make no groups; choose another channel")
        return channel

    @field_validator("engines")
    @classmethod
    def _are_urls(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        for url in engines:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"an engine is a URL such as http://127.0.0.1:8000, not {url!r}")
        return tuple(url.rstrip("/") for url in engines)

    @field_validator("also_ports")
    @classmethod
    def _differ(cls, ports: tuple[int, ...], others: ValidationInfo) -> tuple[int, ...]:
        if len({*ports, others.data.get("port")}) <= len(ports):
            raise ValueError("a port is there twice")
        return ports

    @model_validator(mode="after")
    def _is_one_server_of_a_run(self) -> Self:
        if self.atropos and self.reuse_port:
            raise ValueError(
                "one server serves a run's Atropos environments, so --atropos cannot share its port "
                "(--reuse-port); start `steplog atropos` beside the gateways"
            )
        return self

    def atropos_settings(self) -> AtroposSettings:
        """Of the Atropos API under /atropos: what holds for both is what it is here."""
        return AtroposSettings(
            **{name: getattr(self, name) for name in ServiceSettings.model_fields},
            run=self.run,
            group_size=self.group_size,
            quorum=self.usable_share,
            serve_agents=self.atropos_serve_agents,
            max_queue=self.atropos_max_queue,
        )

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not self.engines and self.engines_file is None:
            raise ValueError("give --engines or --engines-file")
        if self.engines and self.engines_file is not None:
            raise ValueError("give either --engines or --engines-file, not both")
        keyed = self.keys is not None or self.keys_file is not None
        if self.host not in LOOPBACK and not keyed and not self.insecure:
            raise ValueError(
                f"listening on {self.host} lets anybody who reaches it write to the log; "
                "give keys with --keys-file, or --insecure"
            )
        return self
