"""Rollouts that fail, gateways that die, a trainer that has enough, an environment that is killed."""

import asyncio
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pool import topics
from pool.connection import Connection
from pool.topics import LEDGER, POLICY
from schemas import DecidedGroup, Decision, Member, PolicyVersion
from schemas.records import Phase
from steplog import Environment, EnvironmentFailed, Rollout, serve
from steplog.environment.running.journal import Journal
from steplog.kafka import local_kafka
from tests.gateway.client import eventually
from tests.gateway.running import RunningGateway, running_gateway
from tests.gateway.stub_engine import StubEngine
from tests.pool.log import write
from tests.steplog.environment.environments import Broken, Counting, Faulty, Market, running, say
from tests.steplog.environment.player import running_player
from tests.steplog.environment.recorded_log import (
    RecordedLog,
    RecordedTrajectory,
    lines,
    numbers,
    prompts,
    statuses,
)
from tests.tiny_model import EOS

pytestmark = pytest.mark.broker

KEY = "a-key-that-is-long-enough"
NEVER = {"ids": [EOS], "fault": "hang"}
"""An answer that does not come."""


def settings(gateway: RunningGateway, **given: object) -> Counting.Settings:
    usual = {"gateway": gateway.url, "dir": Path("kept"), "jsonl": True, "group_size": 2}
    return Counting.Settings(**{**usual, **given})


def served(gateway: RunningGateway) -> RecordedLog:
    return RecordedLog(gateway.connection, prompts(Path("kept/rollouts.jsonl")))


def test_a_rollout_that_fails_fails_alone(gateway: RunningGateway) -> None:
    size = len(Faulty.kinds)
    chosen = settings(gateway, groups=1, group_size=size, rollout_timeout_s=8, attempts=2)
    asyncio.run(serve(Faulty(chosen)))
    arrived = served(gateway)
    ((_, members),) = arrived.complete_groups(size).items()
    fine = [told for told in members if told.end.status == "completed"]
    assert [told.end.reward for told in fine] == [1.0, 1.0], "the fine one, and that of the retry"
    (late,) = [told.end for told in members if told.end.status == "truncated"]
    assert (late.reason, late.reward) == ("it took more than 8 s", 0.0), "it stays in its group"
    reasons = sorted(told.end.reason or "" for told in members if told.end.status == "failed")
    assert reasons[0].startswith("TryAgain: the shop is closed for ever (environments.py:")
    assert reasons[1].startswith("ValueError: <b>not my day</b> (environments.py:")
    assert reasons[2:] == ["the reward of agent is nan, not a finite number"]
    again = [told for group in arrived.groups("retried").values() for told in group]
    assert [told.end.status for told in again] == ["cancelled"] * 2, (
        "they take no place in the group"
    )
    page = Path("kept/rollouts.html").read_text()
    assert "&lt;b&gt;not my day" in page and "<b>not my day" not in page


def test_agents_of_a_rollout_are_compared_with_their_like(gateway: RunningGateway) -> None:
    asyncio.run(serve(Market(settings(gateway, groups=1, group_size=3))))
    (prompt,) = prompts(Path("kept/rollouts.jsonl"))
    names = [f"{prompt}.buyer", f"{prompt}.seller"]
    groups = RecordedLog(gateway.connection, names).complete_groups(3)
    rewards = {name: [told.end.reward for told in groups[name]] for name in names}
    assert rewards == {names[0]: [1.0] * 3, names[1]: [-1.0] * 3}
    assert all(len(told.steps) == 1 for members in groups.values() for told in members)


def test_when_nothing_works_it_stops_with_a_sentence(gateway: RunningGateway) -> None:
    with pytest.raises(EnvironmentFailed) as stopped:
        asyncio.run(serve(Broken(settings(gateway, max_failures=3, workers=1))))
    told = str(stopped.value)
    assert told.startswith(
        "3 groups in a row had no usable rollout. The last one failed because: RuntimeError"
    )
    assert "the simulator is not installed" in told
    groups = served(gateway).groups()
    assert [statuses(members) for members in groups.values()] == [["failed", "failed"]] * 3


def test_a_gateway_that_never_comes_is_told_in_a_sentence() -> None:
    nowhere = Counting.Settings(gateway="http://127.0.0.1:9", patience_s=0.5)
    with pytest.raises(
        EnvironmentFailed, match=r"No answer from the gateway at http://127.0.0.1:9 for"
    ):
        asyncio.run(serve(Counting(nowhere)))


# With a gateway of their own


@pytest.fixture
def own_log(kafka: local_kafka.Broker) -> Connection:
    own = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"envs-{uuid.uuid4().hex[:8]}.")
    topics.create(own, partitions=2)
    return own


@pytest.fixture(scope="module")
def slow_player() -> Iterator[StubEngine]:
    with running_player(delay=0.3) as engine:
        yield engine


def counting(gateway: RunningGateway, *words: str) -> "subprocess.Popen[str]":
    """Twelve groups of two, each of two calls."""
    return running(
        *("Counting", "serve", "--gateway", gateway.url, "--dir", "kept", "--jsonl"),
        *("--groups", "12", "--group-size", "2", "--turns", "2", "--workers", "3", *words),
    )


def kept() -> list[dict[str, Any]]:
    file = Path("kept/rollouts.jsonl")
    return lines(file) if file.exists() else []


def ended_well(process: "subprocess.Popen[str]") -> None:
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def assert_all_twelve(arrived: RecordedLog) -> None:
    groups = arrived.complete_groups(2)
    assert numbers(groups) == list(range(12)), "each once"
    for members in groups.values():
        assert statuses(members) == ["completed"] * 2
        assert all(len(told.steps) == told.end.steps == 2 for told in members)


@pytest.mark.slow
def test_no_group_is_lost_or_counted_twice_when_the_gateway_is_killed(
    own_log: Connection, slow_player: StubEngine, tokenizer: Path
) -> None:
    with ExitStack() as stack:

        def start(port: int = 0) -> RunningGateway:
            return stack.enter_context(
                running_gateway(own_log, [slow_player.url], tokenizer, port=port)
            )

        gateway = start()
        process = counting(gateway, "--attempts", "1")
        for least in (2, 6):
            eventually(lambda least=least: len(kept()) >= least)  # type: ignore[misc]
            gateway.kill()
            gateway = start(gateway.port)
        ended_well(process)
    assert_all_twelve(RecordedLog(own_log))


@pytest.mark.slow
def test_an_environment_that_was_killed_goes_on_where_it_was(
    own_log: Connection, slow_player: StubEngine, tokenizer: Path
) -> None:
    """Also where URLs are signed: they are in its journal."""
    options = ("--max-groups", "20", "--keys", f"team:{KEY}")
    with running_gateway(own_log, [slow_player.url], tokenizer, *options) as gateway:
        for least in (2, 6):
            slow_player.script([NEVER])  # to the first call, so a group is under way
            process = counting(gateway, "--api-key", KEY)
            eventually(lambda least=least: len(kept()) >= least)  # type: ignore[misc]
            eventually(lambda: slow_player.waiting() == 0)
            process.kill()
            process.communicate()
        ended_well(counting(gateway, "--api-key", KEY))
        arrived = RecordedLog(own_log)
        assert_all_twelve(arrived)
        left = {
            p: told for p, told in arrived.groups().items() if p not in arrived.complete_groups(2)
        }
        assert left, "some groups were under way"
        for members in left.values():
            assert statuses(members) == ["cancelled"] * 2, "whole, and they hold up nobody"
        assert gateway.metric("gateway_admitted_groups") == 12, "and take no place"
    open_ = [told for told in arrived.trajectories.values() if not told.ends]
    assert not open_


def test_two_processes_do_not_share_a_place(gateway: RunningGateway) -> None:
    journal = Journal(Path("kept/journal.jsonl"))
    process = counting(gateway)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        1,
        "Another process is serving in kept. Stop it, or choose another --dir.\n",
    )
    journal.close()


@pytest.mark.slow
def test_while_the_trainer_has_enough_work_waits(
    own_log: Connection, player: StubEngine, tokenizer: Path
) -> None:
    with running_gateway(own_log, [player.url], tokenizer, "--max-groups", "2") as gateway:
        process = counting(gateway)
        decided: set[str] = set()
        while len(decided) < 12:
            # They never number more than they may.
            eventually(lambda: len(kept()) == min(12, len(decided) + 2))
            if len(decided) == 2:
                eventually(lambda: gateway.metric("gateway_refused_groups_total") > 0)
                assert process.poll() is None
            groups = RecordedLog(own_log).groups()
            ended = [prompt for prompt in prompts(Path("kept/rollouts.jsonl")) if prompt in groups]
            decide(own_log, {p: groups[p] for p in ended if p not in decided})
            decided.update(ended)
        ended_well(process)
    assert_all_twelve(RecordedLog(own_log))


def decide(connection: Connection, groups: dict[str, list[RecordedTrajectory]]) -> None:
    """As a trainer does."""
    entries = [
        DecidedGroup(
            prompt_uid=prompt,
            partition=0,
            first_offset=0,
            closed_at=0,
            verdict="train",
            members=[
                Member(trajectory_uid=told.end.trajectory_uid, verdict="train") for told in members
            ],
        )
        for prompt, members in groups.items()
    ]
    write(connection, LEDGER, [Decision(run="default", incarnation=1, sequence=1, groups=entries)])


@pytest.mark.slow
def test_asked_to_stop_it_cancels_what_runs_and_draws_it_again_later(
    own_log: Connection, slow_player: StubEngine, tokenizer: Path
) -> None:
    with running_gateway(own_log, [slow_player.url], tokenizer) as gateway:
        slow_player.script([NEVER])  # to the first call, so something runs
        process = counting(gateway, "--drain-s", "0")
        eventually(lambda: len(kept()) >= 2)
        process.send_signal(signal.SIGTERM)
        ended_well(process)
        told = RecordedLog(own_log).trajectories.values()
        assert "cancelled" in statuses(told), "all of it has its end"
        ended_well(counting(gateway))
    assert_all_twelve(RecordedLog(own_log))


def test_asked_to_stop_it_cancels_an_evaluation_too(
    own_log: Connection, player: StubEngine, tokenizer: Path
) -> None:
    with running_gateway(own_log, [player.url], tokenizer) as gateway:
        words = ("--groups", "1", "--group-size", "2", "--eval-every", "1", "--drain-s", "0")
        process = running("Examined", "serve", "--gateway", gateway.url, "--dir", "kept", *words)
        eventually(Path("examined").exists)
        process.send_signal(signal.SIGTERM)
        ended_well(process)
    arrived = RecordedLog(own_log)
    assert not [told for told in arrived.trajectories.values() if not told.ends]
    examined = [told for members in arrived.groups("val").values() for told in members]
    assert set(statuses(examined)) == {"cancelled"}
    assert "eval/" not in Path("kept/metrics.jsonl").read_text()


def test_groups_of_earlier_are_told_of(gateway: RunningGateway) -> None:
    words = ("--gateway", gateway.url, "--groups", "1", "--group-size", "2", "--dir", "kept")
    ended_well(running("Counting", "serve", *words))
    page = Path("kept/rollouts.html").read_text()
    again = running("Counting", "serve", *words)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "kept already holds 1 groups from an earlier run; raise --groups to make more" in err
    assert Path("kept/rollouts.html").read_text() == page, "not replaced by one that shows nothing"


def test_a_data_set_goes_on_where_it_was_whatever_the_backlog_brought(
    gateway: RunningGateway,
) -> None:
    class Again(Environment[int]):
        async def setup(self) -> None:
            self.items = range(6)

        async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
            await say(rollout, "hello")
            if item in (2, 4):
                self.backlog.append(item + 100)
            return 1.0

    for groups in (3, 6, 12):
        asyncio.run(serve(Again(settings(gateway, groups=groups, workers=1))))
    drawn = [line["item"] for line in kept()]
    epoch = [item for item in drawn if item < 100]
    assert sorted(epoch[:6]) == list(range(6)), drawn
    assert len(epoch) < len(drawn), "the backlog brought something"


def test_the_page_goes_on_with_groups_of_earlier(gateway: RunningGateway) -> None:
    for groups in (2, 3):
        asyncio.run(serve(Counting(settings(gateway, groups=groups, keep=2))))
    page = Path("kept/rollouts.html").read_text()
    shown = re.findall(r"<details class=group><summary><b>(\d+)</b>", page)
    assert shown == [str(line["number"]) for line in reversed(kept()[-2:])], "as many as it keeps"


@pytest.mark.slow
def test_it_serves_until_a_version(kafka: local_kafka.Broker, tokenizer: Path) -> None:
    log = Connection(bootstrap=kafka.bootstrap, topic_prefix=f"until-{uuid.uuid4().hex[:8]}.")
    topics.create(log, partitions=2)

    def train(engine: StubEngine, version: int) -> None:
        phases: tuple[Phase, ...] = ("opened", "live")
        records = [
            PolicyVersion(run="default", incarnation=1, version=version, phase=phase)
            for phase in phases
        ]
        write(log, POLICY, records)
        engine.set_version(f"1.{version}")

    def made(groups: int) -> bool:
        file = Path("kept/rollouts.jsonl")
        return file.exists() and len(lines(file)) >= groups

    async def serve_until(gateway: RunningGateway, engine: StubEngine) -> None:
        serving = asyncio.create_task(serve(Counting(settings(gateway, until_version=2))))
        for version in (1, 2):
            await asyncio.to_thread(eventually, partial(made, 3 * version), 60)
            assert not serving.done(), f"it ended before version {version}"
            await asyncio.to_thread(train, engine, version)
        await asyncio.wait_for(serving, 60)

    with running_player() as engine, running_gateway(log, [engine.url], tokenizer) as gateway:
        assert gateway.get("/policy").body == {
            "run": "default",
            "incarnation": None,
            "version": None,
        }
        asyncio.run(serve_until(gateway, engine))
        assert gateway.get("/policy").body == {"run": "default", "incarnation": 1, "version": 2}
