"""What all service processes share: starting to log, listening, and stopping on signals.

A service logs its settings, with secrets masked, in its first line, once it is clear that it can start;
until then an error is one sentence and nothing else. It stops on SIGTERM and SIGINT after finishing
the work under way.
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
"""Addresses that other machines cannot reach."""


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
    """For validators: refuses an address that other machines can reach, unless `insecure`."""
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
            f"Cannot listen on {host}:{port}: {error.strerror}; choose another {option}"
        ) from error
    return listener


def tune_garbage_collector() -> None:
    """Makes garbage collection rare. What a request leaves behind is freed by reference counting, and
    looking for cycles after every 700 new objects, among everything loaded at the start, took a tenth
    of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; the service then finishes the work under way and stops."""
    stop = threading.Event()

    def request_stop(number: int, _: FrameType | None) -> None:
        log.info("Stopping on %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    return stop
