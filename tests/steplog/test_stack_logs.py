"""Logs of the stack's parts are put aside when they have grown, while the parts write on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from steplog.stack import logs, stack
from steplog.stack.logs import LARGEST_BYTES, OLDER_FILES, numbered, rotate
from steplog.stack.plan import StackPart, StackPlan
from tests.steplog.test_stack import eventually, kill_supervisor, pid_of

MUCH = LARGEST_BYTES + 1


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "stack"
    stack.down(tmp_path / "stack")


def test_what_was_written_is_in_one_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LARGEST_BYTES", 100)
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as part:
        for number in range(60):
            part.write(b"line %d\n" % number)
            rotate(log)
    files = [log, *(numbered(log, number) for number in range(1, OLDER_FILES + 1))]
    text = b"".join(file.read_bytes() for file in reversed(files))
    assert text.endswith(b"".join(b"line %d\n" % number for number in range(30, 60)))
    assert sorted(tmp_path.iterdir()) == sorted(files), "no more than these"


def test_a_small_file_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    assert not rotate(log)
    log.write_text("little")
    assert not rotate(log)
    assert log.read_text() == "little"


def test_a_part_writes_on_through_rotations_and_a_killed_supervisor(directory: Path) -> None:
    gate = directory.parent / "gate"
    # The word comes first: what is written at the very moment of a cut may be lost.
    much = f"echo {{0}}; head -c {MUCH} /dev/zero | tr '\\0' x; echo"
    wait = f"while ! test -e {gate}; do sleep 0.05; done"
    script = f"{much.format('first')}; {wait}; {much.format('second')}; exec sleep 1000"
    plan = StackPlan(parts=(StackPart(name="loud", command=("sh", "-c", script), stop_s=5),))
    folder = stack.up(directory, plan)
    log = folder.log("loud")
    eventually(lambda: numbered(log, 1).exists() and log.stat().st_size < LARGEST_BYTES)
    pid = pid_of(folder, "loud")
    kill_supervisor(folder)
    gate.touch()
    eventually(lambda: log.stat().st_size > LARGEST_BYTES)
    assert not numbered(log, 2).exists(), "nobody looks after it"
    stack.up(directory, plan)
    eventually(lambda: numbered(log, 2).exists() and log.stat().st_size < LARGEST_BYTES)
    assert pid_of(folder, "loud") == pid
    text = b"".join(file.read_bytes() for file in (numbered(log, 2), numbered(log, 1), log))
    assert text.count(b"first\n") == text.count(b"second\n") == 1
