"""docker-compose.yml as data: what a user gets who has changed nothing in .env."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def defaults(value: Any) -> Any:
    """The same with the default of each variable in its place, and `$$` as the shell gets it."""
    if isinstance(value, dict):
        return {key: defaults(one) for key, one in value.items()}
    if isinstance(value, list):
        return [defaults(one) for one in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: found[2] or "", value).replace("$$", "$")
    return value


COMPOSE: dict[str, Any] = defaults(read(FILE))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def variables() -> dict[str, str]:
    """What .env may set, with the defaults."""
    return {found[1]: found[2] or "" for found in VARIABLE.finditer(FILE.read_text())}


def words(service: str) -> list[str]:
    """A service's command, out of the shell that it may stand in."""
    command: list[str] = SERVICES[service].get("command", [])
    return command[2].removeprefix("exec ").split() if command[:2] == ["sh", "-c"] else command


def names(service: str) -> set[str]:
    """By which other containers reach it."""
    networks = SERVICES[service].get("networks", {})
    return {service, *(alias for one in networks.values() for alias in one.get("aliases", ()))}
