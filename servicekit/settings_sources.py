"""Typed settings from a file, the environment and the command line.

Later sources win: file, then environment, then command line. An unknown key is an error that suggests
the nearest existing one. Values never appear in messages, as any of them could hold a secret.

This module knows no service. `SettingsScope` says which other services have settings in the same
places: it is up to them to check their keys.
"""

import argparse
import difflib
import tomllib
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

POSITIONAL: JsonDict = {"positional": True}
"""As a field's `json_schema_extra`: the argument is given without an option name."""

PREFIX = "STEPLOG_"
DEFAULT_FILE = Path("steplog.toml")

Settings = TypeVar("Settings", bound=BaseModel)


class SettingsScope(NamedTuple):
    """The services that share the settings file and the environment."""

    services: Collection[str]
    """Each has a table in the file and a prefix of variables."""
    shared: Mapping[str, FieldInfo] | None
    """The settings that can be given for all services at once; None: they are not known here, and not
    checked."""


class SettingsError(Exception):
    """Settings that cannot be used; each problem is one sentence for a person."""

    def __init__(self, problems: Collection[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class SourcedValue(NamedTuple):
    """A value and the description of its source, for messages."""

    value: Any
    source: str


def add_options(parser: argparse.ArgumentParser, cls: type[BaseModel]) -> None:
    """Adds `--config` and one option per field; options not given stay out of the namespace."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings file in TOML or YAML "
        f"(default: {PREFIX}CONFIG, else {DEFAULT_FILE} if it exists)",
    )
    for name, field in cls.model_fields.items():
        if name == "config":  # a command that passes the file on has it as a setting too
            continue
        flag, help_ = option_flag(name), _help(name, field).replace("%", "%%")
        unset: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_}
        if field.json_schema_extra == POSITIONAL:
            parser.add_argument(name, metavar=name.upper(), **unset)
        elif plain_type(field) is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, dest=name, action=action, **unset)
        else:
            metavar = flag.rpartition("-")[2].upper()
            parser.add_argument(flag, dest=name, metavar=metavar, **unset)


def load(
    cls: type[Settings],
    service: str,
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    scope: SettingsScope,
) -> Settings:
    """Merges all sources into the settings of one service."""
    problems: list[str] = []
    values = {
        **_from_file(cls, service, _file(namespace, environ), scope, problems),
        **_from_environment(cls, service, environ, scope, problems),
        **_from_command_line(cls, namespace),
    }
    try:
        settings = cls.model_validate({name: item.value for name, item in values.items()})
    except ValidationError as error:
        problems += _describe_errors(cls, service, values, error)
    if problems:
        raise SettingsError(problems)
    return settings


def _file(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    chosen = getattr(namespace, "config", None) or environ.get(f"{PREFIX}CONFIG")
    if chosen:
        return Path(chosen)
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _from_file(
    cls: type[BaseModel], service: str, file: Path | None, scope: SettingsScope, problems: list[str]
) -> dict[str, SourcedValue]:
    content = _read(file, problems) if file else {}
    tables = {key: value for key, value in content.items() if key in scope.services}
    shared = {key: value for key, value in content.items() if key not in scope.services}
    if scope.shared is None:  # then an unknown table may belong to another service
        shared = {key: value for key, value in shared.items() if not isinstance(value, dict)}
    problems += [
        f"{key} in {file} must be a table, written [{key}]"
        for key, value in tables.items()
        if not isinstance(value, dict)
    ]
    own = tables.get(service, {})
    own = own if isinstance(own, dict) else {}
    known = scope.shared or {}
    problems += [
        _unknown(f"key {key}", f"at the top level of {file}", key, [*known, *scope.services])
        + (
            f" (as a key of {service}, it belongs in [{service}])"
            if key in cls.model_fields
            else ""
        )
        for key in shared
        if key not in known and (scope.shared is not None or key in cls.model_fields)
    ]
    problems += [
        _unknown(f"key {key}", f"in [{service}] of {file}", key, cls.model_fields)
        for key in own
        if key not in cls.model_fields
    ]
    values = {
        key: SourcedValue(value, f"{key} in {file}")
        for key, value in shared.items()
        if key in known
    }
    values |= {
        key: SourcedValue(value, f"{key} in [{service}] of {file}") for key, value in own.items()
    }
    return {key: item for key, item in values.items() if key in cls.model_fields}


def _read(file: Path, problems: list[str]) -> dict[str, Any]:
    kind = "YAML" if file.suffix in (".yaml", ".yml") else "TOML"
    try:
        text = file.read_text(encoding="utf-8")
        return _parse_yaml(text) if kind == "YAML" else tomllib.loads(text)
    except OSError as error:
        problems.append(f"the settings file {file} cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"the settings file {file} is not valid {kind}: {error}")
    return {}


def _parse_yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(content or {}, dict):
        raise ValueError("it must contain names and values")
    return content or {}


def _from_environment(
    cls: type[BaseModel],
    service: str,
    environ: Mapping[str, str],
    scope: SettingsScope,
    problems: list[str],
) -> dict[str, SourcedValue]:
    known = variables(scope.shared or {}, PREFIX) | variables(cls.model_fields, prefix_of(service))
    checked = (service,) if scope.shared is None else (None, service)
    values = {}
    # Names known for all services come first in `known`, so the service's own overwrite them.
    for variable, (name, is_file) in known.items():
        if variable in environ and name in cls.model_fields:
            text = (
                _read_secret(variable, environ[variable], problems)
                if is_file
                else environ[variable]
            )
            values[name] = SourcedValue(_parse(cls.model_fields[name], text), variable)
    problems += [
        f"{variable} and {variable}_FILE are both set; remove one of them"
        for variable in known
        if variable in environ and f"{variable}_FILE" in known and f"{variable}_FILE" in environ
    ]
    problems += [
        _unknown(f"variable {variable}", "in the environment", variable, known)
        for variable in environ
        if variable.startswith(PREFIX)
        and variable not in {*known, f"{PREFIX}CONFIG"}
        and _owner(variable, scope) in checked
    ]
    return values


def variables(fields: Mapping[str, FieldInfo], prefix: str) -> dict[str, tuple[str, bool]]:
    """The environment variables of these fields; the flag says whether the variable names a file."""
    names = {prefix + name.upper(): (name, False) for name in fields}
    secrets = [name for name, field in fields.items() if plain_type(field) is SecretStr]
    return names | {f"{prefix}{name.upper()}_FILE": (name, True) for name in secrets}


def prefix_of(service: str) -> str:
    return f"{PREFIX}{service.upper().replace('-', '_')}_"


def _owner(variable: str, scope: SettingsScope) -> str | None:
    """The service that a variable belongs to: the one with the longest matching prefix."""
    owners = [service for service in scope.services if variable.startswith(prefix_of(service))]
    return max(owners, key=len, default=None)


def _read_secret(variable: str, file: str, problems: list[str]) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        problems.append(f"the file that {variable} names cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        problems.append(f"the file that {variable} names is not text in UTF-8")
    return ""


def _from_command_line(
    cls: type[BaseModel], namespace: argparse.Namespace
) -> dict[str, SourcedValue]:
    options = {key: value for key, value in vars(namespace).items() if key in cls.model_fields}
    return {
        name: SourcedValue(
            _parse(cls.model_fields[name], value), argument(name, cls.model_fields[name])
        )
        for name, value in options.items()
    }


def _parse(field: FieldInfo, value: Any) -> Any:
    """Splits the text of a field with many values; pydantic parses single values."""
    if isinstance(value, str) and get_origin(plain_type(field)) in (tuple, list):
        return [part.strip() for part in value.split(",")] if value else []
    return value


def plain_type(field: FieldInfo) -> Any:
    """A field's type, without the None of an optional one."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else field.annotation
    return field.annotation


def argument(name: str, field: FieldInfo) -> str:
    return name.upper() if field.json_schema_extra == POSITIONAL else option_flag(name)


def option_flag(name: str) -> str:
    """The command-line option of a field. Fields whose name would be a Python keyword, such as `from_`,
    end with an underscore, which the option leaves out."""
    return "--" + name.rstrip("_").replace("_", "-")


def _help(name: str, field: FieldInfo) -> str:
    kind = plain_type(field)
    parts = [field.description or name.replace("_", " ")]
    if get_origin(kind) is Literal:
        parts.append(f"one of {', '.join(map(str, get_args(kind)))}")
    if get_origin(kind) in (tuple, list):
        parts.append("separated by commas")
    if kind is SecretStr:
        parts.append("better given as a variable or in a file, since others can see a command line")
    return "; ".join(parts) + _default(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return " (required)"
    default = default_text(field)
    return f" (default: {default})" if default else ""


def default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple | list):
        return ",".join(map(str, default))
    return "" if default is None else str(default)


def _unknown(key: str, source: str, name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {key} {source}" + (f"; did you mean {near[0]}?" if near else "")


def _describe_errors(
    cls: type[BaseModel], service: str, values: Mapping[str, SourcedValue], error: ValidationError
) -> list[str]:
    return [
        _describe_error(cls, service, values, ".".join(map(str, problem["loc"])), problem["msg"])
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def _describe_error(
    cls: type[BaseModel], service: str, values: Mapping[str, SourcedValue], path: str, expected: str
) -> str:
    name = path.partition(".")[0]
    if name not in cls.model_fields:
        problem = expected.removeprefix("Value error, ")
        return f"the settings of {service} do not fit together: {problem}"
    if name not in values:
        return (
            f"{name} is missing: give {option_flag(name)}, {prefix_of(service)}{name.upper()}, "
            f"or {name} in [{service}] of the settings file"
        )
    if plain_type(cls.model_fields[name]) is SecretStr:
        expected = "the value is not accepted"
    expected = expected.removeprefix("Value error, ")
    return f"{values[name].source} cannot be used: {expected[:1].lower()}{expected[1:]}"
