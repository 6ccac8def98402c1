"""What every process of ours has in common: how it logs, listens, stops and says what it was given.

A process says its settings in its first line, with secrets masked, once it is clear that it can start:
a mistake is one sentence and nothing else. It stops on SIGTERM and SIGINT,
after what is under way is finished. What it cannot do is one sentence for a person.
"""

import gc
import logging
import re
import signal
import socket
import threading
from types import FrameType
from typing import Any

from pydantic import BaseModel, Field

from pool import logs, tracing
from pool.connection import Connection
from pool.errors import Fatal

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that nobody else can reach."""
LOGIN = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""The user and password of a URL."""


class ServiceSettings(Connection):
    """What every service that stays has besides its own settings."""

    log_format: logs.LogFormat = Field("text", description="lines of the log for people, or JSON")
    traces: bool = Field(
        False, description="send OpenTelemetry traces to where the OTEL_… variables say"
    )


def start_logging(service: str, settings: ServiceSettings) -> None:
    """And traces, where they are wanted: they need the log to say that they cannot be sent."""
    tracing.start(service, settings.traces)
    logs.start(service, settings.log_format, getattr(settings, "run", None))
    log.info("%s: %s", service, masked(settings))


def masked(settings: BaseModel) -> str:
    """The settings in one line."""
    return " ".join(f"{name}={value}" for name, value in shown(settings).items())


def shown(settings: BaseModel) -> dict[str, Any]:
    """What was set, for others to see: a SecretStr is stars only, and a URL has no login."""
    given = settings.model_dump(mode="json", exclude_none=True)
    return {name: _without_login(value) for name, value in given.items()}


def _without_login(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_login(one) for one in value]
    return LOGIN.sub("***", value) if isinstance(value, str) else value


def check_address(host: str, insecure: bool, danger: str) -> None:
    """Refuses, for settings, an address that others can reach, unless that is meant."""
    if host not in LOOPBACK and not insecure:
        raise ValueError(f"listening on {host} {danger}")


def listen(
    host: str, port: int, *, reuse_port: bool = False, option: str = "--port"
) -> socket.socket:
    """A bound socket: port 0 takes any free one. `reuse_port` lets several processes share it."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Fatal(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}"
        ) from error
    return listener


def calm_the_collector() -> None:
    """What a request leaves behind goes by reference counts. Looking for cycles after every 700 new
    objects, through all that was loaded at the start, took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def stopped_by_signals() -> threading.Event:
    """Set when the process is asked to stop. What is under way is finished first, by whoever looks."""
    stop = threading.Event()

    def ask(number: int, _: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    return stop
