"""`steplog atropos --train`: environments run although nobody registers or pulls, because steplog's own
trainer takes their groups from the log. Here its records are written by the test."""

from collections.abc import Iterator
from typing import Any

import pytest

from pool.connection import Connection
from pool.topics import LEDGER, POLICY, REWARDED
from schemas import DecidedGroup, Decision, PolicyVersion, ScoredGroup, SkippedRange
from schemas.records import Phase
from tests.gateway.atropos.running import (
    ENV,
    TRAINING,
    RunningAtropos,
    running_atropos,
    scored,
    until,
)
from tests.pool.log import records, write

pytestmark = pytest.mark.broker

GROUPS_PER_BATCH = 3


class Trainer:
    """What `steplog train` writes to the log."""

    def __init__(self, log: Connection, run: str) -> None:
        self.log, self.run = log, run
        self._sequence = 0

    def start(self, topic: str = "rewarded") -> None:
        self._write("started", 0, topic=topic, groups_per_batch=GROUPS_PER_BATCH)

    def set_live(self, version: int) -> None:
        self._write("live", version)

    def _write(self, phase: Phase, version: int, **fields: Any) -> None:
        record = PolicyVersion(run=self.run, incarnation=1, version=version, phase=phase, **fields)
        write(self.log, POLICY, [record])

    def posted(self) -> list[ScoredGroup]:
        found = records(self.log, REWARDED)
        return [one for one in found if isinstance(one, ScoredGroup) and one.run == self.run]

    def decide(self, *groups: ScoredGroup, skipped: list[SkippedRange] | None = None) -> None:
        self._sequence += 1
        decided = [
            DecidedGroup(
                prompt_uid=group.prompt_uid,
                partition=0,
                first_offset=0,
                closed_at=0,
                verdict="train",
            )
            for group in groups
        ]
        decision = Decision(
            run=self.run,
            incarnation=1,
            sequence=self._sequence,
            groups=decided,
            skipped=skipped or [],
        )
        write(self.log, LEDGER, [decision])


@pytest.fixture(scope="module")
def served(atropos_log: Connection) -> Iterator[RunningAtropos]:
    with running_atropos(atropos_log, "--train", "--run", "own") as running:
        yield running


@pytest.fixture(scope="module")
def trainer(atropos_log: Connection) -> Trainer:
    return Trainer(atropos_log, "own")


def joined(atropos: RunningAtropos, **env: Any) -> dict[str, Any]:
    """An environment that asks until the trainer is there, as stock ones do."""
    answer: dict[str, Any] = {}

    def ask() -> bool:
        answer.update(atropos.post("/register-env", ENV | env))
        return bool(answer["status"] == "success")

    until(ask)
    return answer


def polled(atropos: RunningAtropos, env_id: int) -> tuple[int, int, int]:
    """Step, groups that wait, and how many of them are its own."""
    status = atropos.get("/status-env", {"env_id": env_id})
    return status["current_step"], status["queue_size"], status["self_queue_size"]


def test_environments_run_without_a_trainer_that_pulls(
    served: RunningAtropos, trainer: Trainer
) -> None:
    """And all of it comes back after SIGKILL."""
    assert served.post("/register-env", ENV)["status"] == "wait for trainer to start"
    trainer.start()
    first = joined(served, group_size=4)
    assert served.get("/info") == {"batch_size": GROUPS_PER_BATCH * 4, "max_token_len": -1}
    second = joined(served, group_size=2, desired_name="other")
    assert served.get("/info")["batch_size"] == GROUPS_PER_BATCH * 2
    assert first["num_steps"] > 10**9
    assert served.get("/wandb_info") == {"group": "own", "project": "steplog"}

    for size, env_id in ((4, 0), (3, 0), (2, 1), (2, 1), (4, None)):
        answer = served.post("/scored_data", scored(1.0, size, env_id))
        assert answer == {"status": "received"}, "no size has to wait for another"
    assert polled(served, first["env_id"]) == (0, 5, 2)
    assert polled(served, second["env_id"]) == (0, 5, 2)

    posted = trainer.posted()
    assert {group.channel for group in posted} == {"train"}
    trainer.decide(*[group for group in posted if group.env_id == 0])
    until(lambda: polled(served, 0) == (0, 3, 0))
    trainer.set_live(1)
    until(lambda: polled(served, 0) == (1, 3, 0))

    served.kill_server()
    assert polled(served, 1) == (1, 3, 2)
    assert served.get("/info")["batch_size"] == GROUPS_PER_BATCH * 2
    trainer.decide(*posted)
    trainer.set_live(2)
    until(lambda: polled(served, 1) == (2, 0, 0))


def test_decisions_and_versions_made_while_no_server_ran_are_caught_up_with(
    served: RunningAtropos, trainer: Trainer
) -> None:
    trainer.start()
    joined(served)
    served.post("/scored_data", scored(2.0))
    posted = trainer.posted()
    step = served.get("/status")["current_step"]
    served.kill_server()
    trainer.decide(*posted)
    trainer.set_live(step + 5)
    until(lambda: served.get("/status") == {"current_step": step + 5, "queue_size": 0})


def test_a_group_in_a_skipped_range_does_not_wait_for_ever(
    served: RunningAtropos, trainer: Trainer
) -> None:
    trainer.start()
    joined(served)
    served.post("/scored_data", scored(3.0))
    assert served.get("/status")["queue_size"] == 1
    skipped = [SkippedRange(partition=number, first=0, end=10**6) for number in range(3)]
    trainer.decide(skipped=skipped)
    until(lambda: served.get("/status")["queue_size"] == 0)


def test_nobody_else_may_take_the_groups(served: RunningAtropos) -> None:
    batch = served.get("/batch")
    assert batch["status"] == "error" and "steplog train" in batch["message"]
    for method, path, body in (("POST", "/register", TRAINING), ("GET", "/reset_data", None)):
        answer = served.ask(method, path, body)
        assert answer.status == 409 and "steplog train" in answer.body["detail"]


def test_a_trainer_that_would_never_read_the_groups_is_named(atropos_log: Connection) -> None:
    with running_atropos(atropos_log, "--train", "--run", "tagged") as running:
        Trainer(atropos_log, "tagged").start(topic="rewarded.other")
        until(lambda: running.ask("GET", "/ready").status == 503)
        assert "without --rewards" in str(running.get("/ready"))
        Trainer(atropos_log, "tagged").start()
        joined(running)
        assert running.ask("GET", "/ready").status == 200


def test_who_takes_the_groups_of_a_run_does_not_change(
    atropos_log: Connection, served: RunningAtropos, trainer: Trainer
) -> None:
    with running_atropos(atropos_log, "--run", "pulled") as running:
        running.begin()
        running.stop()
    with running_atropos(atropos_log, "--run", "pulled", "--train", wait=False) as running:
        assert running.process.wait(60) == 1
        assert "wait for a trainer that pulls batches" in running.log.read_text()
    trainer.start()
    joined(served)
    with running_atropos(atropos_log, "--run", "own", wait=False) as running:
        assert running.process.wait(60) == 1
        assert "start this server with --train" in running.log.read_text()
