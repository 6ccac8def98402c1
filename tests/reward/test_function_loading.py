"""Where functions come from, and one sentence for each that cannot be used."""

import socket
from pathlib import Path

import pytest

from pool.connection import Connection
from reward.scoring.loading import (
    DEFAULT_AT_ONCE,
    DEFAULT_ATTEMPTS,
    DEFAULT_TIMEOUT_S,
    UnusableFunction,
    load,
    load_all,
)
from tests.steplog.command import reaching, steplog

SCORE = "def score(trajectory):\n    return 1.0\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(SCORE)
    return file


def test_a_name_in_a_file(file: Path) -> None:
    found = load(f"{file}:score")
    assert (found.name, found.weight, found.is_async) == ("score", 1.0, False)
    assert (found.timeout_s, found.attempts, found.at_once) == (
        DEFAULT_TIMEOUT_S,
        DEFAULT_ATTEMPTS,
        DEFAULT_AT_ONCE,
    )
    assert found.call(None) == 1.0


def test_a_name_in_a_module(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.syspath_prepend(file.parent)
    (file.parent / "my_own_rewards.py").write_text("async " + SCORE)
    found = load("my_own_rewards:score")
    assert found.is_async and len(found.version) == 12


def test_settings_of_a_function_are_read_from_its_query(file: Path) -> None:
    found = load(f"{file}:score?weight=-0.5&timeout_s=2&attempts=1&at_once=7&name=n&version=v")
    assert (found.weight, found.timeout_s, found.attempts, found.at_once) == (-0.5, 2.0, 1, 7)
    assert (found.name, found.version) == ("n", "v")


def test_parameters_go_to_a_function_of_ours_by_their_type() -> None:
    found = load("length_penalty?max_tokens=10&scale=0.5&weight=2")
    assert (found.name, found.weight, found.is_async) == ("length_penalty", 2.0, False)
    assert load("regex?pattern=a%2B%2Cb&full=true").name == "regex"


def test_another_text_is_another_version(file: Path) -> None:
    before = load(f"{file}:score").version
    assert load(f"{file}:score").version == before
    file.write_text(SCORE + "\n# changed\n")
    assert load(f"{file}:score").version != before


@pytest.mark.parametrize("version", ["'7'", "7"])
def test_a_function_may_say_its_version(file: Path, version: str) -> None:
    file.write_text(f"{SCORE}\nscore.version = {version}\n")
    assert load(f"{file}:score").version == "7"


@pytest.mark.parametrize(
    "body",
    [
        "async def score(trajectory): ...",
        "class Judge:\n    async def __call__(self, trajectory): ...\nscore = Judge()",
        "import functools\nasync def f(a, t): ...\nscore = functools.partial(f, 1)",
    ],
)
def test_asynchronous_functions_are_known_in_every_shape(file: Path, body: str) -> None:
    file.write_text(body)
    assert load(f"{file}:score").is_async


def test_two_functions_of_one_name_are_refused_unless_one_is_renamed(file: Path) -> None:
    with pytest.raises(UnusableFunction, match="the same name; give one"):
        load_all([f"{file}:score", f"{file}:score?weight=2"])
    found = load_all([f"{file}:score", f"{file}:score?name=again"])
    assert [function.name for function in found] == ["score", "again"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("nothing", "There is no reward function 'nothing'. Built-in ones are exact_match, "),
        ("rewards.py", "There is no reward function 'rewards.py'"),
        ("exact_match?key", "must be NAME\\?parameter=value"),
        ("exact_match?colour=red", "exact_match has no parameter 'colour'"),
        ("exact_match?ignore_case=perhaps", "ignore_case of exact_match cannot be 'perhaps'"),
        ("length_penalty?max_tokens=many", "max_tokens of length_penalty cannot be 'many'"),
        ("length_penalty", "length_penalty cannot be created: .*max_tokens"),
        ("length_penalty?max_tokens=-1", "length_penalty cannot be created: "),
        ("regex?pattern=(", "regex cannot be created: "),
        ("json_schema?schema=/nowhere.json", "json_schema cannot be created: "),
        ("exact_match?weight=heavy", "weight of .* cannot be 'heavy'"),
        ("exact_match?weight=nan", "weight of .* cannot be nan"),
        ("exact_match?timeout_s=0", "timeout_s of .* cannot be 0"),
        ("exact_match?timeout_s=inf", "timeout_s of .* cannot be inf"),
        ("exact_match?attempts=0", "attempts of .* cannot be 0"),
        ("exact_match?at_once=-1", "at_once of .* cannot be -1"),
        ("/nowhere/rewards.py:score", "There is no file /nowhere/rewards.py"),
        ("no_such_module_of_ours:score", "no_such_module_of_ours cannot be loaded: ModuleNotFound"),
        ("math:score", "math has no function score"),
        ("math:pi", "math has no function pi"),
        ("math:sqrt?base=2", "math:sqrt takes no parameters, so 'base' cannot be set"),
    ],
)
def test_a_bad_spec_is_told_in_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(UnusableFunction, match=sentence):
        load(spec)


@pytest.mark.parametrize("body", ["1 / 0", "def score(:", "import sys; sys.exit(0)"])
def test_a_file_that_cannot_be_loaded_is_named(file: Path, body: str) -> None:
    file.write_text(body)
    with pytest.raises(UnusableFunction, match=f"{file} cannot be loaded: "):
        load(f"{file}:score")


@pytest.mark.parametrize("spec", ["nothing", "/nowhere/rewards.py:score", "exact_match?at_once=0"])
def test_the_command_ends_with_one_line_and_status_1(spec: str) -> None:
    ended = steplog("reward", "--function", spec, "--bootstrap", "127.0.0.1:1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("steplog: ") and ended.stderr.count("\n") == 1


def test_a_tokenizer_that_is_not_there_is_told(file: Path) -> None:
    ended = steplog("reward", "--function", f"{file}:score", "--tokenizer", str(file.parent))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"steplog: {file.parent} has no tokenizer.json; --tokenizer takes a tokenizer's folder\n"
    )


@pytest.mark.parametrize("option", ["--at-once=0", "--processes=0", "--port=70000"])
def test_settings_out_of_range_are_status_2(option: str) -> None:
    ended = steplog("reward", option)
    assert ended.returncode == 2
    assert ended.stderr.startswith("steplog: ")


@pytest.mark.broker
def test_a_port_that_is_taken_is_told(log: Connection, file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = steplog(
            "reward", *reaching(log), "--function", f"{file}:score", "--port", port, "--slot", "p"
        )
    assert ended.returncode == 1
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr
