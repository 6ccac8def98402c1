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
        None, description="file with one engine URL per line; it is read again when it changes"
    )
    tokenizer: str = Field(description="folder of the model's tokenizer and chat template")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, lt=65536, description="port to listen on")
    also_ports: tuple[Annotated[int, Field(gt=0, lt=65536)], ...] = Field(
        (),
        description="additional ports to listen on; Atropos environments without a list of servers use "
        "9004,9005,9006,9007",
    )
    reuse_port: bool = Field(
        False, description="share the port with other gateway processes (SO_REUSEPORT)"
    )
    run: str = Field("default", description="training run that Steps belong to")
    group_size: Positive = Field(
        8, description="trajectories per group, unless an environment says otherwise"
    )
    deadline_s: float = Field(
        6 * 3600, gt=0, le=5 * 24 * 3600, description="seconds until a trajectory expires"
    )
    unbound_channel: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="record calls that name no trajectory, each sample as a trajectory of its own in "
        "this channel (default: such calls are refused, except short probes)",
    )
    parse: Literal["tools", "always"] = Field(
        "tools",
        description="when the engine parses answers: for requests with tools, or always (for engines "
        "with a reasoning parser)",
    )
    max_prompt_tokens: Positive | None = Field(
        None, description="longest accepted prompt, in tokens"
    )
    max_response_tokens: Positive | None = Field(
        None, description="longest response, in tokens; also applied to requests without max_tokens"
    )
    max_body_bytes: Positive = Field(
        8 * 1024 * 1024, description="largest accepted request body, in bytes"
    )
    max_requests: Positive = Field(4096, description="concurrent requests per API key")
    max_open_trajectories: Positive = Field(100_000, description="open trajectories per tenant")
    max_groups: Positive | None = Field(
        None,
        description="groups in flight, running or waiting for the trainer: (eta + 1) * B; further "
        "groups get 429 (default: three batches of the trainer, once one has started)",
    )
    usable_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a group's trajectories that must be usable for it to be trained",
    )
    engine_wait_s: float = Field(
        30, gt=0, description="seconds that a call waits for a usable engine"
    )
    engine_timeout_s: float = Field(
        600, gt=0, description="seconds until a call to an engine times out"
    )
    drain_s: Positive = Field(60, description="seconds that running calls get to finish on SIGTERM")
    keys: SecretStr | None = Field(
        None, description="API keys, as TENANT:KEY[,TENANT:KEY…]; enables authentication"
    )
    keys_file: Path | None = Field(
        None, description="file of API keys, one TENANT:sha256:HEX per line (see `steplog key`)"
    )
    signing_secret: SecretStr | None = Field(
        None, description="secret that signs base URLs (default: derived from the keys)"
    )
    insecure: bool = Field(False, description="listen beyond loopback without keys")
    atropos: bool = Field(
        False,
        description="also serve Atropos environments and trainers, under /atropos, like "
        "`steplog atropos`",
    )
    atropos_train: bool = Field(
        False, description="train the groups posted there with `steplog train` of the same run"
    )
    atropos_serve_agents: bool = Field(
        False, description="also serve groups of the run's agents there, from channel `train`"
    )
    atropos_max_queue: Positive | None = Field(
        None, description="groups waiting there; further posts get 503 (default: no limit)"
    )
    reward: str | None = Field(None, description="URL of a reward worker, for /compute_reward")

    @field_validator("unbound_channel")
    @classmethod
    def _check_unbound_channel(cls, channel: str | None) -> str | None:
        if channel == "train":
            raise ValueError(
                "calls without a trajectory have no reward and form no groups, so they cannot be "
                "trained: choose another channel than train"
            )
        return channel

    @field_validator("engines")
    @classmethod
    def _check_engine_urls(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        for url in engines:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"an engine must be a URL such as http://127.0.0.1:8000, not {url!r}"
                )
        return tuple(url.rstrip("/") for url in engines)

    @field_validator("also_ports")
    @classmethod
    def _check_distinct_ports(cls, ports: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if len({*ports, info.data.get("port")}) <= len(ports):
            raise ValueError("a port is listed twice, or is the same as --port")
        return ports

    @model_validator(mode="after")
    def _check_single_atropos_server(self) -> Self:
        if self.atropos and self.reuse_port:
            raise ValueError(
                "only one server may serve a run's Atropos environments, so --atropos excludes "
                "--reuse-port: start `steplog atropos` beside the gateways instead"
            )
        return self

    def atropos_settings(self) -> AtroposSettings:
        """Settings of the Atropos API under /atropos; shared settings are taken from the gateway."""
        return AtroposSettings(
            **{name: getattr(self, name) for name in ServiceSettings.model_fields},
            run=self.run,
            group_size=self.group_size,
            quorum=self.usable_share,
            train=self.atropos_train,
            serve_agents=self.atropos_serve_agents,
            max_queue=self.atropos_max_queue,
        )

    @model_validator(mode="after")
    def _check_engines_and_keys(self) -> Self:
        if not self.engines and self.engines_file is None:
            raise ValueError("no engines are configured: give --engines or --engines-file")
        if self.engines and self.engines_file is not None:
            raise ValueError("give either --engines or --engines-file, not both")
        keyed = self.keys is not None or self.keys_file is not None
        if self.host not in LOOPBACK and not keyed and not self.insecure:
            raise ValueError(
                f"listening on {self.host} without keys lets anybody on the network write to the log: "
                "give keys with --keys-file, or --insecure to allow it"
            )
        return self
