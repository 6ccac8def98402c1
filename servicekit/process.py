"""What every process of ours has in common: how it logs, listens, stops and says what it was given.

A process says its settings in its first line, with secrets masked, once it is clear that it can start:
a mistake is one sentence and nothing else. It stops on SIGTERM and SIGINT,
after what is under way is finished. What it cannot do is one sentence for a person.
"""

import gc
import logging
import signal
import socket
import threading
from types import FrameType

from pydantic import BaseModel, Field

from servicekit import logs, tracing
from servicekit.errors import Fatal
from servicekit.masking import format_settings

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that nobody else can reach."""


class ObservabilitySettings(BaseModel):
    """How a service logs and traces; every long-running service has these settings."""

    log_format: logs.LogFormat = Field("text", description="format of log lines")
    traces: bool = Field(
        False, description="export OpenTelemetry traces as configured by the OTEL_… variables"
    )


def start_logging(service: str, settings: ObservabilitySettings) -> None:
    """Start logging and, if enabled, tracing; then log the settings, secrets masked."""
    tracing.start(service, settings.traces)
    logs.start(service, settings.log_format, getattr(settings, "run", None))
    log.info("%s: %s", service, format_settings(settings))


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


def tune_garbage_collector() -> None:
    """What a request leaves behind goes by reference counts. Looking for cycles after every 700 new
    objects, through all that was loaded at the start, took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def stop_on_signals() -> threading.Event:
    """Set when the process is asked to stop. What is under way is finished first, by whoever looks."""
    stop = threading.Event()

    def ask(number: int, _: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    return stop
