"""Loads reward functions from their specs, with their weights and limits.

    exact_match                                 a built-in function (`reward.functions`)
    rewards.py:score                            a function in a file
    my_package.rewards:score                    a function in a module
    length_penalty?max_tokens=512&weight=0.1    with parameters, and a weight in the sum

`weight`, `name`, `version`, `timeout_s`, `attempts` and `at_once` are settings of any function; all
other parameters go to the factory of a built-in one. A function that a user wrote takes none.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from urllib.parse import parse_qsl

from reward import functions
from servicekit import distribution
from servicekit.errors import Fatal

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_ATTEMPTS = 3
DEFAULT_AT_ONCE = 100


class UnusableFunction(Fatal):
    """A reward function cannot be loaded."""


@dataclass(frozen=True)
class RewardFunction:
    """`call` takes a Trajectory; it may be a coroutine function."""

    name: str
    version: str
    call: Callable[[Any], Any]
    weight: float = 1.0
    timeout_s: float = DEFAULT_TIMEOUT_S
    attempts: int = DEFAULT_ATTEMPTS
    """Number of times that it may hang or raise before the trajectory fails."""
    at_once: int = DEFAULT_AT_ONCE
    """Limit on concurrent calls of an asynchronous function."""

    @property
    def identity(self) -> str:
        return function_identity(self.name, self.version, self.weight)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 - an object with an async __call__
        )


def function_identity(name: str, version: str, weight: float) -> str:
    """Functions with equal identities give equal rewards."""
    return f"{name} {version} ×{weight:g}"


COMMON_PARAMETERS = {"weight": float, "timeout_s": float, "attempts": int, "at_once": int}


def load_all(specs: Sequence[str]) -> list[RewardFunction]:
    loaded = [load(spec) for spec in specs]
    names = [function.name for function in loaded]
    if len(set(names)) < len(names):
        raise UnusableFunction("Two reward functions have the same name; give one `?name=…`.")
    return loaded


def load(spec: str) -> RewardFunction:
    target, _, query = spec.partition("?")
    try:
        parameters = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise UnusableFunction(f"{spec!r} must be NAME?parameter=value&…: {error}") from error
    common = {
        name: _parse(spec, name, parameters.pop(name), kind)
        for name, kind in COMMON_PARAMETERS.items()
        if name in parameters
    }
    _check_limits(spec, common)
    name, version = parameters.pop("name", None), parameters.pop("version", None)
    load_target = _load_users if ":" in target else _load_builtin
    function = load_target(target, parameters)
    return RewardFunction(
        name=name or function.name,
        version=version or function.version,
        call=function.call,
        **common,
    )


def _load_builtin(name: str, parameters: Mapping[str, str]) -> RewardFunction:
    if name not in functions.FUNCTIONS:
        raise UnusableFunction(
            f"There is no reward function {name!r}. Built-in ones are "
            f"{', '.join(functions.FUNCTIONS)}; name your own as FILE.py:NAME or MODULE:NAME."
        )
    factory = functions.load(name)
    hints = get_type_hints(factory)
    unknown = [parameter for parameter in parameters if parameter not in hints]
    if unknown:
        raise UnusableFunction(f"{name} has no parameter {unknown[0]!r}")
    typed = {key: _parse(name, key, value, hints[key]) for key, value in parameters.items()}
    try:
        call = factory(**typed)
    except Exception as error:  # a parameter is missing or has an unusable value
        raise UnusableFunction(f"{name} cannot be created: {error}") from error
    return RewardFunction(name, _builtin_version(parameters), call)


def _builtin_version(parameters: Mapping[str, str]) -> str:
    """The version of steplog and the parameters: with other parameters it is another reward."""
    if not parameters:
        return distribution.version()
    # Imported here because it loads pydantic, which most scoring processes do not need.
    from servicekit.masking import LOGIN

    query = "&".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{distribution.version()}?{LOGIN.sub('***', query)}"


def _check_limits(spec: str, common: Mapping[str, float]) -> None:
    """A limit of 0 would block every trajectory forever; a weight of NaN would spoil every sum."""
    for name, value in common.items():
        if not math.isfinite(value) or (name != "weight" and value <= 0):
            raise UnusableFunction(f"{name} of {spec} cannot be {value:g}")


def _parse(owner: str, name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind in (int, float, str, Path):
            return kind(text)
    except (KeyError, ValueError):
        raise UnusableFunction(f"{name} of {owner} cannot be {text!r}") from None
    return text.split("|")


def _load_users(target: str, parameters: Mapping[str, str]) -> RewardFunction:
    source, _, name = target.rpartition(":")
    if parameters:
        raise UnusableFunction(
            f"{target} takes no parameters, so {next(iter(parameters))!r} cannot be set"
        )
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    call = getattr(module, name, None)
    if not callable(call):
        raise UnusableFunction(f"{source} has no function {name}")
    version = str(getattr(call, "version", "") or _source_version(module))
    return RewardFunction(name, version, call)


def _import_file(file: Path) -> ModuleType:
    name = f"steplog_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UnusableFunction(f"There is no file {file}.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _import_errors_explained(str(file)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    # The path of the steplog command lacks the current folder. It goes last, so that nothing in it
    # shadows our packages.
    if "" not in sys.path:
        sys.path.append("")
    with _import_errors_explained(name):
        return importlib.import_module(name)


@contextmanager
def _import_errors_explained(source: str) -> Iterator[None]:
    """Whatever a user's file raises on import becomes an error that names the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UnusableFunction(f"{source} cannot be loaded: {error!r}") from error


def _source_version(module: ModuleType) -> str:
    """A hash of the source: changed code is another version."""
    file = getattr(module, "__file__", None)
    content = Path(file).read_bytes() if file else module.__name__.encode()
    return hashlib.blake2b(content, digest_size=6).hexdigest()
