import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from servicekit.errors import Fatal
from steplog import cli
from steplog.commands import COMMANDS, Command, load_object
from steplog.kafka import commands, local_kafka
from steplog.settings import SERVICES
from steplog.stack import planner as planning
from tests.conftest import free_port
from tests.steplog.command import STEPLOG, steplog


@pytest.fixture
def stopped(workplace: Path) -> Iterator[Path]:
    """The default directory; whatever runs there ends with the test."""
    directory = workplace / ".steplog" / "kafka"
    yield directory
    local_kafka.stop(directory)


@pytest.mark.slow
@pytest.mark.broker
def test_two_starts_at_once_give_one_broker_that_outlives_them(stopped: Path) -> None:
    port = free_port()
    command = [STEPLOG, "kafka", "start", "--port", str(port)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [start.communicate()[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    broker = local_kafka.status(stopped)
    assert broker is not None
    described = f"Kafka {broker.version} on 127.0.0.1:{port}, pid {broker.pid}, in {stopped}"
    assert all(described in line for line in said)

    running = steplog("kafka", "status")
    assert (running.returncode, running.stdout) == (0, f"running: {described}\n")
    again = steplog("kafka", "start", "--port", str(port))
    assert (again.returncode, again.stdout) == (0, f"already running: {described}\n")
    stop = steplog("kafka", "stop")
    assert (stop.returncode, stop.stdout) == (0, f"stopped: {described}\n")
    for word, status in (("status", 1), ("stop", 0)):
        nothing = steplog("kafka", word)
        assert nothing.returncode == status
        assert nothing.stdout == "No broker is running in .steplog/kafka.\n"
        assert nothing.stderr == ""


@pytest.mark.broker
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_start_leaves_no_broker_behind(
    stopped: Path, number: signal.Signals, status: int
) -> None:
    command = [STEPLOG, "kafka", "start", "--port", str(free_port())]
    start = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid_file = stopped / "broker.json"
    while not pid_file.exists() and start.poll() is None:
        select.select([], [], [], 0.02)
    process = os.pidfd_open(json.loads(pid_file.read_text())["pid"])
    start.send_signal(number)
    assert start.communicate(timeout=60) == ("", "")
    assert start.returncode == status
    assert select.select([process], [], [], 0)[0]
    os.close(process)
    assert not pid_file.exists()


def test_a_broker_error_is_one_sentence_and_status_1(workplace: Path) -> None:
    (workplace / "novel.txt").touch()
    done = steplog("kafka", "start", "--dir", ".", "--port", str(free_port()))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"steplog: {workplace} holds files that do not belong to a local broker, such as"
        " novel.txt. Choose an empty directory.\n"
    )


def test_settings_errors_are_a_sentence_each_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPLOG_KAFKA_PROT", "1")
    done = steplog("kafka", "status", "--port", "70000", "--heap", "much")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "steplog: unknown variable STEPLOG_KAFKA_PROT in the environment; did you mean"
        " STEPLOG_KAFKA_PORT?",
        "steplog: --port cannot be used: input should be less than or equal to 65535",
        "steplog: --heap cannot be used: string should match pattern '^[1-9][0-9]*[mg]$'",
    ]


def test_settings_reach_a_command_from_file_and_environment(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "steplog.toml").write_text("[kafka]\ndir = 'from-file'\n")
    assert steplog("kafka", "status").stdout == "No broker is running in from-file.\n"
    monkeypatch.setenv("STEPLOG_KAFKA_DIR", "from-environment")
    assert steplog("kafka", "status").stdout == "No broker is running in from-environment.\n"


@pytest.mark.parametrize(
    "words", [(), ("kafka",), ("kafak",), ("kafka", "begin"), ("kafka", "start", "--prot", "1")]
)
def test_usage_errors_are_status_2(words: tuple[str, ...], capsys: object) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["kafka", "--help"], ["kafka", "start", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("steplog 0.")
    assert "--port PORT" in text


def test_help_imports_no_service() -> None:
    code = (
        "import sys, steplog.cli\n"
        "try: steplog.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'pydantic', 'confluent_kafka', 'steplog.settings'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_m_steplog_is_the_command_whatever_the_current_folder_holds(
    workplace: Path,
) -> None:
    for name in ("steplog", "servicekit", "pool", "gateway"):
        (workplace / f"{name}.py").write_text("raise SystemExit('a module of the current folder')")
    for words in (["--version"], ["kafka", "status"], ["gateway", "--help"]):
        module = subprocess.run([*planning.STEPLOG, *words], capture_output=True, text=True)
        script = steplog(*words)
        assert module.stderr == ""
        assert (module.returncode, module.stdout) == (script.returncode, script.stdout)


def test_commands_of_one_service_share_one_settings_class() -> None:
    for command in COMMANDS:
        assert SERVICES[command.service] == command.settings
    assert len({command.path for command in COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.path)
def test_every_command_has_its_settings_and_its_entry(command: Command) -> None:
    assert issubclass(load_object(command.settings), BaseModel)
    if not command.entry.startswith(("trainer.", "steplog.demo.")):  # these import torch
        assert callable(load_object(command.entry))


def test_a_missing_torch_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(commands, "status", fail)
    assert cli.main(["kafka", "status"]) == 1
    assert capsys.readouterr().err == (
        "steplog: This command needs the package torch. Install it with `pip install"
        " 'steplog-rl[gpu]'`, or on a machine without a GPU with `pip install"
        " 'steplog-rl[cpu]'`.\n"
    )


def test_a_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reader, writer = os.pipe()
    os.close(reader)
    for words in (["--help"], ["kafka", "status"]):
        done = subprocess.run([STEPLOG, *words], stdout=writer, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, b"")
    os.close(writer)


def test_an_error_of_the_log_is_one_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise Fatal("the log is closed on Sundays")

    monkeypatch.setattr(commands, "status", fail)
    assert cli.main(["kafka", "status"]) == 1
    assert capsys.readouterr().err == "steplog: the log is closed on Sundays\n"


def test_sigterm_ends_a_background_job_too() -> None:
    """Shells start these with Ctrl-C ignored."""
    code = (
        "import signal, sys\n"
        "from steplog import cli\n"
        "from steplog.kafka import commands\n"
        "def wait(_): print('runs', flush=True); signal.pause()\n"
        "commands.status = wait\n"
        "sys.exit(cli.main(['kafka', 'status']))"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.SIG_IGN)\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "runs\n"
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=60) == ("", "")
    assert job.returncode == 143
