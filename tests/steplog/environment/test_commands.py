"""The command line of an environment."""

import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from steplog.environment import commands
from steplog.environment.base import settings_class
from tests.steplog.command import steplog
from tests.steplog.environment.environments import Counting, run

NOWHERE = ("--gateway", "http://127.0.0.1:9", "--patience-s", "0.1")


def chosen(monkeypatch: pytest.MonkeyPatch, *words: str) -> Counting.Settings:
    """The settings with which `serve` begins."""
    seen: list[Counting.Settings] = []

    async def look(environment: Counting, _: object) -> int:
        seen.append(environment.settings)
        return 0

    monkeypatch.setitem(commands.COMMANDS, "serve", (look, "look"))
    assert commands.main(Counting, ["serve", *words]) == 0
    return seen[0]


def test_flags_win_over_variables_over_files_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toml = Path("env.toml")
    toml.write_text("[env]\ngroup_size = 2\nturns = 2\nseed = 2\n[gateway]\nport = 1\n")
    monkeypatch.setenv("STEPLOG_ENV_TURNS", "3")
    monkeypatch.setenv("STEPLOG_ENV_SEED", "3")
    told = chosen(monkeypatch, "--config", "env.toml", "--seed", "4")
    assert (told.workers, told.group_size, told.turns, told.seed) == (16, 2, 3, 4)


def test_yaml_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("env.yaml").write_text("env:\n  group_size: 2\n  trackers: [wandb]\n")
    told = chosen(monkeypatch, "--config", "env.yaml")
    assert (told.group_size, told.trackers) == (2, ("wandb",))


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("e.toml", "[env]\ngroup_sise = 2", "did you mean group_size?"),
        ("e.toml", "group_size = 2", "it belongs in [env]"),
        ("e.toml", "env = 2", "env in e.toml must be a table"),
        ("e.yaml", "env:\n  turns: many", "turns in [env] of e.yaml cannot be used"),
        ("e.yaml", "env: [", "the settings file e.yaml is not valid YAML"),
        ("e.yaml", "- env", "it must contain names and values"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(
    capsys: pytest.CaptureFixture[str], file: str, text: str, sentence: str
) -> None:
    Path(file).write_text(text)
    assert commands.main(Counting, ["serve", "--config", file]) == 2
    told = capsys.readouterr().err
    assert sentence in told and len(told.splitlines()) == 1


def test_a_variable_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPLOG_ENV_GROUPSIZE", "2")
    monkeypatch.setenv("STEPLOG_BOOTSTRAP", "elsewhere:9092")  # the services'
    assert commands.main(Counting, ["serve"]) == 2
    assert capsys.readouterr().err == (
        "unknown variable STEPLOG_ENV_GROUPSIZE in the environment; "
        "did you mean STEPLOG_ENV_GROUP_SIZE?\n"
    )


def test_the_class_says_which_settings_it_has() -> None:
    assert settings_class(Counting) is Counting.Settings


def test_what_cannot_go_on_is_one_sentence_and_status_1() -> None:
    done = run("Counting", "serve", *NOWHERE)
    assert done.returncode == 1
    assert done.stderr.startswith("No answer from the gateway at http://127.0.0.1:9 for 0.1 s: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_url_that_is_no_gateway_is_told() -> None:
    handler = partial(SimpleHTTPRequestHandler, directory="/nowhere")
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = run("Counting", "serve", "--gateway", url)
        server.shutdown()
    assert (done.returncode, done.stderr) == (
        1,
        f"{url} is not a gateway: /ready answered 404. Give the gateway's address without a path, "
        "such as http://HOST:8100.\n",
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Name an environment and a command: steplog env FILE.py:ENVIRONMENT {serve"),
        (["my.py"], "Name an environment and a command"),
        (["no.py:Mine", "serve"], "no.py cannot be loaded: FileNotFoundError"),
        (["bad.py:Mine", "serve"], "bad.py cannot be loaded: ZeroDivisionError: division by zero"),
        (["my.py:Yours", "serve"], "my.py has no environment named Yours"),
        (["my.py:Path", "serve"], "my.py has no environment named Path"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    Path("my.py").write_text("from pathlib import Path\n")
    Path("bad.py").write_text("1 / 0\n")
    assert commands.run(words) == 2
    told = capsys.readouterr().err
    assert sentence in told and len(told.splitlines()) == 1


def test_an_environment_of_a_file_is_run_by_the_command() -> None:
    Path("mine.py").write_text(
        "from steplog import Environment, EnvironmentSettings\n"
        "class Wide(EnvironmentSettings):\n    width: int = 3\n"
        "class Mine(Environment[int]):\n    settings: Wide\n"
    )
    told = steplog("env", "mine.py:Mine", "serve", "--help")
    assert told.returncode == 0 and "--width WIDTH" in told.stdout
    assert "usage: steplog env mine.py:Mine serve" in told.stdout
    assert "env " in steplog("--help").stdout
    told = steplog("env", "--help")
    assert told.returncode == 0 and "FILE.py:ENVIRONMENT {serve" in told.stdout
