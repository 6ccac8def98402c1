"""docs/settings.md and docs/metrics.md, made from what they describe: `python -m steplog.reference`.

A test fails when a file is not what this gives, so nobody has to remember to write a setting down.
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
MADE = "<!-- Made by `make docs` from the code: change it there. -->"
METRICS = {
    "gateway.metrics": "The gateway",
    "gateway.atropos.metrics": "The Atropos server",
    "reward.metrics": "The reward worker",
    "trainer.metrics": "The trainer",
    "servicekit.metrics": "Every consumer",
    "console.metrics": "The monitor",
}
KINDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "datetime": "time",
    "SecretStr": "secret",
}

SETTINGS_HEAD = f"""# Settings
{MADE}

Every setting can be a flag, a variable or a key in the file; a flag wins over a variable, and a
variable over the file ([operations.md](operations.md#settings)). A setting that is true or false has a
flag for each, like `--insecure` and `--no-insecure`. Several values are separated by commas, and in the
file they are a list. A secret may also stand in a file that the variable with `_FILE` behind its name
gives.
"""
METRICS_HEAD = f"""# Metrics
{MADE}

What `/metrics` of each process shows to Prometheus, besides Python's own. What to do when one of them
is wrong is in [troubleshooting.md](troubleshooting.md).
"""
OF_A_MODULE = {
    "trainer.metrics": "What belongs to a step has the same name, without `trainer_`, in the ledger's "
    "Outcome and in every\ntracker. What a run does not measure is NaN.",
    "servicekit.metrics": "Reward workers and the trainer have these too.",
    "console.metrics": "`steplog monitor`. Those of Kafka have the names and labels of kafka_exporter, "
    "so that dashboards made\nfor it work.",
}


def settings_page() -> str:
    parts = [SETTINGS_HEAD, *_shared(), *(line for name in SERVICES for line in _service(name))]
    return "\n".join(parts) + "\n"


def _shared() -> Iterator[str]:
    yield "## Every command that talks to Kafka\n"
    yield f"As a variable, `{PREFIX}KEY` is for all commands and `{PREFIX}COMMAND_KEY` for one; in the"
    yield "file, the top level is for all and the command's table for one.\n"
    yield from _table(ServiceSettings, PREFIX, SHARED)


def _service(service: str) -> Iterator[str]:
    cls = settings_class(service)
    names = ", ".join(f"`steplog {one.path}`" for one in COMMANDS if one.service == service)
    yield f"\n## {service}\n"
    shared = SHARED if issubclass(cls, Connection) else {}
    too = " It takes those of every command too." if shared else ""
    yield f"{names}; in the file `[{service}]`.{too}\n"
    yield from _table(cls, prefix_of(service), [n for n in cls.model_fields if n not in shared])


def _table(cls: type[BaseModel], prefix: str, names: Iterable[str]) -> Iterator[str]:
    yield "| flag | variable | key | type | default | what it means |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        field = cls.model_fields[name]
        cells = [
            f"`{argument(name, field)}`",
            f"`{prefix}{name.upper()}`",
            f"`{name}`",
            _kind(plain_type(field)),
            "required" if field.is_required() else _default(field),
            field.description or "",
        ]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    text = default_text(field)
    return f"`{text.lower() if plain_type(field) is bool else text}`" if text else ""


def _kind(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin in (tuple, list):
        return f"several: {_kind(get_args(kind)[0])}"
    if args := get_args(kind):
        # A choice of types, perhaps none, or one with its limits, which are no types.
        return " or ".join(_kind(one) for one in args if getattr(one, "__name__", "") in KINDS)
    return KINDS[kind.__name__]


def metrics_page() -> str:
    parts = [METRICS_HEAD]
    for module, title in METRICS.items():
        about = OF_A_MODULE.get(module)
        parts += [f"## {title}\n", *([f"{about}\n"] if about else [])]
        parts += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        parts += [*dict.fromkeys(_row(*metric) for metric in metrics_of(module)), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def metrics_of(module: str) -> Iterator[tuple[str, str, Iterable[str], str]]:
    """Name, type, labels and meaning of what a module exports."""
    names = vars(import_module(module))
    for metric in names.get("ALL", ()):
        yield metric.name, metric.kind, metric.labels, metric.help
    for found in names.values():
        for one in found.values() if isinstance(found, dict) else (found,):
            # One with values for its labels is a part of another.
            if isinstance(one, MetricWrapperBase) and not one._labelvalues:
                family = next(iter(one.describe()))
                name = f"{family.name}_total" if family.type == "counter" else family.name
                yield name, family.type, one._labelnames, family.documentation


def _row(name: str, kind: str, labels: Iterable[str], what: str) -> str:
    return f"| `{name}` | {kind} | {', '.join(labels)} | {what} |"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {DOCS / name}\n")


if __name__ == "__main__":
    main()
