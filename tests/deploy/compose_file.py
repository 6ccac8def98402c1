"""docker-compose.yml as data, with the default value of every variable."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def fill_defaults(value: Any) -> Any:
    """Replaces each variable by its default, and `$$` by the `$` that the shell gets."""
    if isinstance(value, dict):
        return {key: fill_defaults(one) for key, one in value.items()}
    if isinstance(value, list):
        return [fill_defaults(one) for one in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: match[2] or "", value).replace("$$", "$")
    return value


COMPOSE: dict[str, Any] = fill_defaults(read(FILE))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def variables() -> dict[str, str]:
    """The variables that .env may set, with their defaults."""
    return {match[1]: match[2] or "" for match in VARIABLE.finditer(FILE.read_text())}


def words(service: str) -> list[str]:
    """A service's command, without the `sh -c` around it."""
    command: list[str] = SERVICES[service].get("command", [])
    return command[2].removeprefix("exec ").split() if command[:2] == ["sh", "-c"] else command


def names(service: str) -> set[str]:
    """The host names under which other containers reach the service."""
    networks = SERVICES[service].get("networks", {})
    return {service, *(alias for one in networks.values() for alias in one.get("aliases", ()))}
