"""Makes the plan of a stack from its settings. The settings of every service are read first, so that
mistakes in any of them are reported before anything is started."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel

from gateway.settings import GatewaySettings
from reward.settings import RewardSettings
from steplog.kafka.broker_directory import HOST
from steplog.kafka.local_kafka import LocalKafkaSettings
from steplog.settings import load
from steplog.stack.plan import BrokerPlan, StackPart, StackPlan
from steplog.stack.settings import StackSettings
from steplog.topics import TopicsSettings
from trainer.settings import TrainSettings

GATEWAY_EXIT_S = 10.0
"""Seconds that a gateway has to exit after its drain."""
TRAINER_EXIT_S = 300.0
"""Seconds in which a trainer finishes its step and writes a checkpoint."""
STEPLOG = (sys.executable, "-P", "-m", "steplog")
"""The command, found without a console script. -P: the current folder is not searched for modules, so
that a user's own `trainer` there cannot take the place of ours."""
ALL_ADDRESSES = ("0.0.0.0", "::", "")

Settings = TypeVar("Settings", bound=BaseModel)


class StackPlanner:
    """Plans the parts of a stack: broker, engines, topics, trainer, reward workers, gateway."""

    def __init__(self, settings: StackSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._kafka = self._load(LocalKafkaSettings, "kafka")
        chosen = settings.kafka
        self._is_local = settings.bootstrap is None if chosen is None else chosen
        local = f"{HOST}:{self._kafka.port}"
        self._bootstrap = local if self._is_local else settings.bootstrap or local

    def plan(self) -> StackPlan:
        is_local = self._is_local
        kafka, services = self._kafka, set(self._settings.services)
        parts = [StackPart(name="kafka", kind="kafka", url=self._bootstrap)] if is_local else []
        parts += self._engines()
        parts.append(self._topics(("kafka",) if is_local else ()))
        if "train" in services:
            parts.append(self._train())
        if "reward" in services:
            parts += self._rewards()
        if "gateway" in services:
            parts.append(self._gateway())
        broker = BrokerPlan(dir=str(kafka.dir.resolve()), port=kafka.port, heap=kafka.heap)
        return StackPlan(
            parts=tuple(parts),
            broker=broker if is_local else None,
            hang_s=self._settings.hang_s,
        )

    def _load(self, cls: type[Settings], service: str) -> Settings:
        return load(cls, service, Namespace(config=self._settings.config), self._environ)

    def _command(self, *words: str, **options: object) -> tuple[str, ...]:
        file = self._settings.config
        options = {
            **({"config": file.resolve()} if file is not None else {}),
            "bootstrap": self._bootstrap,
            **options,
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return (*STEPLOG, *words, *flags)

    def _engines(self) -> list[StackPart]:
        commands = [tuple(shlex.split(command)) for command in self._settings.engine]
        urls: Sequence[str | None] = self._engine_urls() if commands else ()
        urls = [*urls, *[None] * len(commands)][: len(commands)]
        names = ["engine"] if len(commands) == 1 else [f"engine-{n}" for n in range(len(commands))]
        return [
            StackPart(
                name=name,
                command=command,
                url=url,
                ready=_route(url, "health"),
                health=_route(url, "health"),
            )
            for name, command, url in zip(names, commands, urls, strict=True)
        ]

    def _engine_urls(self) -> tuple[str, ...]:
        if "gateway" in self._settings.services:
            return self._load(GatewaySettings, "gateway").engines
        if "train" in self._settings.services:
            return self._load(TrainSettings, "train").engines
        return ()

    def _topics(self, needs: tuple[str, ...]) -> StackPart:
        self._load(TopicsSettings, "topics")
        return StackPart(
            name="topics", kind="once", command=self._command("topics", "create"), needs=needs
        )

    def _gateway(self) -> StackPart:
        settings = self._load(GatewaySettings, "gateway")
        return StackPart(
            name="gateway",
            command=self._command("gateway"),
            needs=("topics",),
            stop_s=settings.drain_s + GATEWAY_EXIT_S,
            url=(url := _url(settings.host, settings.port)),
            ready=_route(url, "ready"),
            health=_route(url, "health"),
        )

    def _rewards(self) -> list[StackPart]:
        settings = self._load(RewardSettings, "reward")
        if self._settings.reward_workers == 1:
            return [self._reward("reward", _url(settings.host, settings.port))]
        slots = range(self._settings.reward_workers)
        ports = [settings.port and settings.port + slot for slot in slots]
        return [
            self._reward(f"reward-{slot}", _url(settings.host, port), port=port, slot=slot)
            for slot, port in zip(slots, ports, strict=True)
        ]

    def _reward(self, name: str, url: str | None, **options: object) -> StackPart:
        return StackPart(
            name=name,
            command=self._command("reward", **options),
            needs=("topics",),
            url=url,
            ready=_route(url, "ready"),
            health=_route(url, "health"),
        )

    def _train(self) -> StackPart:
        settings = self._load(TrainSettings, "train")
        return StackPart(
            name="train",
            command=self._command("train"),
            needs=("topics",),
            stop_s=TRAINER_EXIT_S,
            url=(url := _url(settings.host, settings.port)),
            ready=_route(url, "ready"),
            health=_route(url, "health"),
        )


def _url(host: str, port: int) -> str | None:
    """None for port 0: the part chooses a free port, which is not known here."""
    return f"http://{HOST if host in ALL_ADDRESSES else host}:{port}" if port else None


def _route(url: str | None, route: str) -> str | None:
    return f"{url}/{route}" if url else None
