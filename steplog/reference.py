"""Generates docs/settings.md and docs/metrics.md from the code: `python -m steplog.reference`.

A test fails if a page differs from what this module generates, so every setting is documented.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pool.connection import Connection
from pool.settings import ServiceSettings
from servicekit.settings_sources import PREFIX, argument, default_text, plain_type, prefix_of
from steplog.commands import COMMANDS
from steplog.settings import SERVICES, SHARED, settings_class

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = "<!-- Generated from the code by `make docs`; change it there. -->"
METRICS = {
    "gateway.metrics": "The gateway",
    "gateway.atropos.metrics": "The Atropos server",
    "reward.metrics": "The reward worker",
    "trainer.metrics": "The trainer",
    "servicekit.metrics": "Every consumer",
    "console.metrics": "The monitor",
}
TYPE_NAMES = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "datetime": "time",
    "SecretStr": "secret",
}

SETTINGS_HEAD = f"""# Settings
{GENERATED}

Every setting can be given as a flag, as an environment variable or as a key in the settings file. A
flag wins over a variable, and a variable over the file ([operations.md](operations.md#settings)). A
true or false setting has a flag for each, such as `--insecure` and `--no-insecure`. Several values
are separated by commas; in the file they are a list. A secret can also be read from a file: set the
variable with `_FILE` appended to its name to the file's path.
"""
METRICS_HEAD = f"""# Metrics
{GENERATED}

The Prometheus metrics of each process at `/metrics`, besides those of Python itself. What to do if
one of them looks wrong is in [troubleshooting.md](troubleshooting.md).
"""
MODULE_NOTES = {
    "trainer.metrics": "Metrics of a training step have the same name, without `trainer_`, in the "
    "ledger's Outcome and in\ntrackers. A metric that a run does not measure is NaN.",
    "servicekit.metrics": "Reward workers and the trainer export these as well.",
    "console.metrics": "Exported by `steplog monitor`. Kafka's metrics have the names and labels of "
    "kafka_exporter, so that\ndashboards made for it work.",
}


def settings_page() -> str:
    parts = [
        SETTINGS_HEAD,
        *_shared_section(),
        *(line for name in SERVICES for line in _service_section(name)),
    ]
    return "\n".join(parts) + "\n"


def _shared_section() -> Iterator[str]:
    yield "## All commands that use Kafka\n"
    yield f"The variable `{PREFIX}KEY` applies to all commands, `{PREFIX}COMMAND_KEY` to one. In the"
    yield "file, keys at the top level apply to all commands, keys in a command's table to that one.\n"
    yield from _table(ServiceSettings, PREFIX, SHARED)


def _service_section(service: str) -> Iterator[str]:
    cls = settings_class(service)
    names = ", ".join(f"`steplog {one.path}`" for one in COMMANDS if one.service == service)
    yield f"\n## {service}\n"
    shared = SHARED if issubclass(cls, Connection) else {}
    note = " The settings of all commands apply too." if shared else ""
    yield f"{names}; in the file `[{service}]`.{note}\n"
    yield from _table(cls, prefix_of(service), [n for n in cls.model_fields if n not in shared])


def _table(cls: type[BaseModel], prefix: str, names: Iterable[str]) -> Iterator[str]:
    yield "| flag | variable | key | type | default | meaning |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        field = cls.model_fields[name]
        cells = [
            f"`{argument(name, field)}`",
            f"`{prefix}{name.upper()}`",
            f"`{name}`",
            _type_name(plain_type(field)),
            "required" if field.is_required() else _default(field),
            field.description or "",
        ]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    text = default_text(field)
    return f"`{text.lower() if plain_type(field) is bool else text}`" if text else ""


def _type_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin in (tuple, list):
        return f"several: {_type_name(get_args(kind)[0])}"
    if args := get_args(kind):
        # A union, possibly with None, or a type annotated with limits, which are not types.
        return " or ".join(
            _type_name(one) for one in args if getattr(one, "__name__", "") in TYPE_NAMES
        )
    return TYPE_NAMES[kind.__name__]


def metrics_page() -> str:
    parts = [METRICS_HEAD]
    for module, title in METRICS.items():
        note = MODULE_NOTES.get(module)
        parts += [f"## {title}\n", *([f"{note}\n"] if note else [])]
        parts += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        parts += [*dict.fromkeys(_row(*metric) for metric in metrics_of(module)), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def metrics_of(module: str) -> Iterator[tuple[str, str, Iterable[str], str]]:
    """Name, type, labels and help of the metrics that a module defines."""
    names = vars(import_module(module))
    for metric in names.get("ALL", ()):
        yield metric.name, metric.kind, metric.labels, metric.help
    for value in names.values():
        for metric in value.values() if isinstance(value, dict) else (value,):
            # A metric with label values is a child of another one.
            if isinstance(metric, MetricWrapperBase) and not metric._labelvalues:
                family = next(iter(metric.describe()))
                name = f"{family.name}_total" if family.type == "counter" else family.name
                yield name, family.type, metric._labelnames, family.documentation


def _row(name: str, kind: str, labels: Iterable[str], help_: str) -> str:
    return f"| `{name}` | {kind} | {', '.join(labels)} | {help_} |"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {DOCS / name}\n")


if __name__ == "__main__":
    main()
