"""Lines of the log: text for people, or JSON for machines.

A line about a trajectory, a Step or a version carries their ids as `extra`, so that all lines on one of
them can be found. No line says what an agent or a model said, nor a key: who logs an error that may
quote them logs its kind.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Literal

from servicekit import tracing

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
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
"""What a line may carry besides its words."""

log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    def __init__(self, service: str, run: str | None = None) -> None:
        super().__init__()
        self._service = service
        self._run = {} if run is None else {"run": run}

    def format(self, record: logging.LogRecord) -> str:
        known = vars(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **self._run,
            **{name: known[name] for name in FIELDS if name in known},
        }
        if trace := tracing.current().traceparent:
            line["trace_id"] = trace.split("-")[1]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start(service: str, shape: LogFormat, run: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format=TEXT)
    logging.getLogger("aiokafka").setLevel(logging.WARNING)  # it tells of every topic it opens
    if shape == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines(service, run))
        _take_over_the_rest()


def is_json() -> bool:
    return any(isinstance(h.formatter, JsonLines) for h in logging.getLogger().handlers)


def _take_over_the_rest() -> None:
    """What would be written past our handlers: of libraries with their own, of Python itself."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, _: _uncaught(kind, error)
    threading.excepthook = lambda told: _uncaught(told.exc_type, told.exc_value)


def _uncaught(kind: type[BaseException], error: BaseException | None) -> None:
    log.critical("nobody expected %s", kind.__name__, exc_info=error)
