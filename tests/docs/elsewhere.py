"""What the pages show and this machine cannot run, each with who does, and what is checked here.

A line of a page that begins with one of these is not run. Keep the list short: a command that only is
slow belongs in a proof, and one that needs another machine must at least be read by its own parser.
"""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.docs.pages import ROOT

Words = Sequence[str]


def is_a_target(words: Words) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    missing = [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]
    assert targets and not missing, f"there is no target {missing}"


def is_compose(words: Words) -> None:
    assert words[1] == "compose" and (ROOT / "docker-compose.yml").exists()


def has_settings(words: Words) -> None:
    """The command's own parser and settings take it as it stands."""
    settings_of(words, os.environ)


def is_planned(words: Words) -> None:
    from steplog.stack.planning import Planning

    Planning(settings_of(words, os.environ), os.environ).plan()


def starts_ours(words: Words) -> None:
    has_settings(words[words.index("steplog") :])


def nothing(_: Words) -> None:
    pass


ELSEWHERE: Mapping[tuple[str, ...], tuple[str, Callable[[Words], None]]] = {
    ("make",): ("the targets are what a continuous integration runs", is_a_target),
    ("docker",): ("needs a Docker engine; tests/deploy reads the file", is_compose),
    ("vllm", "serve"): ("a stub stands in; its flags: test_vllm_takes_the_flags", nothing),
    ("torchrun",): ("needs GPUs; tests/trainer/model/test_sharding.py has ranks", starts_ours),
    ("uv",): ("needs a package index", nothing),
    ("steplog", "atropos"): ("serves for ever; tests/gateway/atropos", has_settings),
    ("steplog", "train"): ("needs a model; tests/trainer/learning proves it", has_settings),
    ("steplog", "export"): ("needs a checkpoint; tests/trainer/test_export.py", has_settings),
    ("steplog", "replay"): ("needs a run in the ledger; tests/replay", has_settings),
    ("steplog", "demo"): ("takes minutes; tests/steplog/test_demo.py proves it", has_settings),
    ("steplog", "up"): ("needs engines; tests/steplog/test_stack.py, test_demo.py", is_planned),
    ("steplog", "status"): ("as `steplog up`", has_settings),
    ("steplog", "down"): ("as `steplog up`", has_settings),
}
"""By the first words: the reason, and the check."""


def settings_of(words: Words, environ: Mapping[str, str]) -> Any:
    """What a `steplog …` command would run with. Imported here: most programs need none of it."""
    from steplog.cli import make_parser
    from steplog.commands import find_command
    from steplog.settings import load, settings_class

    said = list(words[1:])
    namespace: Namespace = make_parser(said).parse_args(said)
    command = find_command(said)
    assert command is not None
    return load(settings_class(command.service), command.service, namespace, environ)


def find(words: Words) -> Callable[[Words], None] | None:
    for length in (2, 1):
        if found := ELSEWHERE.get(tuple(words[:length])):
            return found[1]
    return None
