"""Reward functions by name: where they come from, what they weigh, and what limits they have.

    exact_match                                 one of `reward.functions`
    rewards.py:score                            a name in a file
    my_package.rewards:score                    a name in a module
    length_penalty?max_tokens=512&weight=0.1    with parameters, and a weight in the sum

`weight`, `name`, `version`, `timeout_s`, `attempts` and `at_once` are settings of any function; all
other parameters are given to the factory that makes it. A function that a user wrote takes none.
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
from servicekit.masking import LOGIN

TIMEOUT = 60.0
ATTEMPTS = 3
AT_ONCE = 100


class UnusableFunction(Fatal):
    """A reward function cannot be loaded."""


@dataclass(frozen=True)
class Function:
    """`call` takes a TrajectoryView; it may be a coroutine function."""

    name: str
    version: str
    call: Callable[[Any], Any]
    weight: float = 1.0
    timeout_s: float = TIMEOUT
    attempts: int = ATTEMPTS
    """Times that it may hang or be short of something before the trajectory fails."""
    at_once: int = AT_ONCE
    """Calls of an asynchronous function at the same time."""

    @property
    def described(self) -> str:
        return described(self.name, self.version, self.weight)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 - an object with an async __call__
        )


def described(name: str, version: str, weight: float) -> str:
    """Functions of which this is equal give equal rewards."""
    return f"{name} {version} ×{weight:g}"


OWN = {"weight": float, "timeout_s": float, "attempts": int, "at_once": int}


def load_all(specs: Sequence[str]) -> list[Function]:
    found = [load(spec) for spec in specs]
    names = [function.name for function in found]
    if len(set(names)) < len(names):
        raise UnusableFunction("two reward functions have the same name; give one `?name=…`")
    return found


def load(spec: str) -> Function:
    target, _, query = spec.partition("?")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise UnusableFunction(f"{spec!r} must be NAME?parameter=value&…: {error}") from error
    own = {
        name: _typed(spec, name, given.pop(name), kind)
        for name, kind in OWN.items()
        if name in given
    }
    _check_limits(spec, own)
    name, version = given.pop("name", None), given.pop("version", None)
    made = _builtin(target, given) if ":" not in target else _users(target, given)
    return Function(name=name or made.name, version=version or made.version, call=made.call, **own)


def _builtin(name: str, parameters: Mapping[str, str]) -> Function:
    if name not in functions.FUNCTIONS:
        raise UnusableFunction(
            f"there is no reward function {name!r}; there are {', '.join(functions.FUNCTIONS)}, and "
            "yours as FILE.py:NAME"
        )
    factory = functions.load(name)
    hints = get_type_hints(factory)
    unknown = [given for given in parameters if given not in hints]
    if unknown:
        raise UnusableFunction(f"{name} has no parameter {unknown[0]!r}")
    typed = {key: _typed(name, key, value, hints[key]) for key, value in parameters.items()}
    try:
        made = factory(**typed)
    except Exception as error:  # a parameter is missing, or its value is of no use
        raise UnusableFunction(f"{name} cannot be made: {error}") from error
    version = distribution.version()
    if parameters:  # with others it is another reward
        given = "&".join(f"{key}={value}" for key, value in sorted(parameters.items()))
        version += "?" + LOGIN.sub("***", given)
    return Function(name, version, made)


def _check_limits(spec: str, own: Mapping[str, float]) -> None:
    """A limit of 0 would let nothing through for ever, and a weight of NaN spoil every sum."""
    for name, value in own.items():
        if not math.isfinite(value) or (name != "weight" and value <= 0):
            raise UnusableFunction(f"{name} of {spec} cannot be {value:g}")


def _typed(where: str, name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind in (int, float, str, Path):
            return kind(text)
    except (KeyError, ValueError):
        raise UnusableFunction(f"{name} of {where} cannot be {text!r}") from None
    return text.split("|")


def _users(target: str, parameters: Mapping[str, str]) -> Function:
    where, _, name = target.rpartition(":")
    if parameters:
        raise UnusableFunction(f"{target} takes no parameter, such as {next(iter(parameters))!r}")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    call = getattr(module, name, None)
    if not callable(call):
        raise UnusableFunction(f"{where} has no function {name}")
    return Function(name, str(getattr(call, "version", "") or _source_version(module)), call)


def _from_file(file: Path) -> ModuleType:
    name = f"steplog_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UnusableFunction(f"there is no file {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _explained(str(file)):
        spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    # The command's own path lacks the current folder; last, so that nothing there shadows ours.
    if "" not in sys.path:
        sys.path.append("")
    with _explained(name):
        return importlib.import_module(name)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Whatever a user's file raises, it is the file that cannot be used."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UnusableFunction(f"{where} cannot be loaded: {error!r}") from error


def _source_version(module: ModuleType) -> str:
    """Of what was loaded: another text is another version."""
    file = getattr(module, "__file__", None)
    content = Path(file).read_bytes() if file else module.__name__.encode()
    return hashlib.blake2b(content, digest_size=6).hexdigest()
