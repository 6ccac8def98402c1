"""Log lines of services: as text for people, or as JSON for machines.

A line about a trajectory, a Step or a version has their ids as `extra`, so that all lines about one of
them can be found. No line contains a key, or text of an agent or a model: of an error whose message may
quote them, only the type is logged.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal

from servicekit import tracing

LogFormat = Literal["text", "json"]
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = (
    "run",
    "trajectory_uid",
    "prompt_uid",
    "step_id",
    "version",
    "incarnation",
    "sequence",
    "topic",
    "partition",
    "offset",
)
"""Names of `extra` that JSON lines include."""

log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str, run: str | None = None) -> None:
        super().__init__()
        self._service = service
        self._run = {} if run is None else {"run": run}

    def format(self, record: logging.LogRecord) -> str:
        attributes = vars(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **self._run,
            **{name: attributes[name] for name in FIELDS if name in attributes},
        }
        if trace := tracing.current().traceparent:
            line["trace_id"] = trace.split("-")[1]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start(service: str, log_format: LogFormat, run: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format=TEXT_FORMAT)
    logging.getLogger("aiokafka").setLevel(logging.WARNING)  # it logs every topic it opens
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(service, run))
        _redirect_other_loggers()


def is_json() -> bool:
    return any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers)


def _redirect_other_loggers() -> None:
    """Sends to our handlers what would bypass them: libraries with handlers of their own, warnings, and
    uncaught exceptions."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, _: _log_uncaught(kind, error)
    threading.excepthook = lambda hook: _log_uncaught(hook.exc_type, hook.exc_value)


def _log_uncaught(kind: type[BaseException], error: BaseException | None) -> None:
    log.critical("Unhandled exception: %s", kind.__name__, exc_info=error)
