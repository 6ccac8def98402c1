"""Commands that pages show but tests cannot run: the reason for each, and what is checked instead.

A command line that begins with one of these is checked, not run. Keep the list short: a command that is
merely slow belongs in a proof, and one that needs another machine must at least pass its own parser.
"""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from tests.docs.pages import ROOT

Words = Sequence[str]
Check = Callable[[Words], None]


class Unrunnable(NamedTuple):
    reason: str
    check: Check


def check_make_target(words: Words) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    missing = [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]
    assert targets and not missing, f"the Makefile has no target {missing}"


def check_compose(words: Words) -> None:
    assert words[1] == "compose" and (ROOT / "docker-compose.yml").exists()


def check_settings(words: Words) -> None:
    """The command's own parser and settings accept the command line."""
    settings_of(words, os.environ)


def check_stack_plan(words: Words) -> None:
    from steplog.stack.planner import StackPlanner

    StackPlanner(settings_of(words, os.environ), os.environ).plan()


def check_steplog_behind_launcher(words: Words) -> None:
    check_settings(words[words.index("steplog") :])


def check_atropos_options(words: Words) -> None:
    """Atropos environments have these options, if its library is installed to ask."""
    if find_spec("atroposlib") is None:
        return
    from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

    known = {f"--env.{name}" for name in BaseEnvConfig.model_fields}
    known |= {f"--openai.{name}" for name in APIServerConfig.model_fields}
    missing = {word for word in words if word.startswith("--")} - known
    assert not missing, f"Atropos environments have no option {missing}"


def check_nothing(_: Words) -> None:
    pass


UNRUNNABLE: Mapping[tuple[str, ...], Unrunnable] = {
    ("make",): Unrunnable("continuous integration runs the targets", check_make_target),
    ("docker",): Unrunnable("needs a Docker engine; tests/deploy reads the file", check_compose),
    ("vllm", "serve"): Unrunnable(
        "a stub stands in; test_vllm_accepts_the_flags checks the flags", check_nothing
    ),
    ("torchrun",): Unrunnable(
        "needs GPUs; tests/trainer/model/test_sharding.py has ranks", check_steplog_behind_launcher
    ),
    ("uv",): Unrunnable("needs a package index", check_nothing),
    ("steplog", "atropos"): Unrunnable("serves forever; tests/gateway/atropos", check_settings),
    ("python", "environments/gsm8k_server.py"): Unrunnable(
        "needs Atropos' repository and a dataset; tests/gateway/atropos/test_training.py",
        check_atropos_options,
    ),
    ("steplog", "train"): Unrunnable("needs a model; tests/trainer/learning", check_settings),
    ("steplog", "export"): Unrunnable(
        "needs a checkpoint; tests/trainer/test_export.py", check_settings
    ),
    ("steplog", "replay"): Unrunnable("needs a run in the ledger; tests/replay", check_settings),
    ("steplog", "demo"): Unrunnable(
        "takes minutes; tests/steplog/test_demo.py runs it", check_settings
    ),
    ("steplog", "up"): Unrunnable(
        "needs engines; tests/steplog/test_stack.py and test_demo.py", check_stack_plan
    ),
    ("steplog", "status"): Unrunnable("as `steplog up`", check_settings),
    ("steplog", "down"): Unrunnable("as `steplog up`", check_settings),
}
"""Keyed by the first words of the command."""


def settings_of(words: Words, environ: Mapping[str, str]) -> Any:
    """The settings of a `steplog …` command. Imported lazily: most programs need none of it."""
    from steplog.cli import make_parser
    from steplog.commands import find_command
    from steplog.settings import load, settings_class

    arguments = list(words[1:])
    namespace: Namespace = make_parser(arguments).parse_args(arguments)
    command = find_command(arguments)
    assert command is not None
    return load(settings_class(command.service), command.service, namespace, environ)


def find_check(words: Words) -> Check | None:
    for length in (2, 1):
        if command := UNRUNNABLE.get(tuple(words[:length])):
            return command.check
    return None
