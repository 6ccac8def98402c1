"""Evaluations: all held-out items, after groups or at versions of the weights, once each."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steplog import Environment, EnvironmentSettings, Rollout, evaluate
from steplog.environment.backends.direct import Direct
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.running import session
from steplog.environment.running.journal import Journal
from steplog.environment.running.session import Session
from tests.steplog.environment.environments import say
from tests.steplog.environment.openai_server import running_server
from tests.steplog.environment.recorded_log import lines

FOLDER = Path("kept")


class Many(Environment[int]):
    async def get_next_item(self) -> int:
        return self.index

    async def eval_items(self) -> range:
        return range(200)

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
        await say(rollout, str(item))
        return float(item % 2)


class Few(Many):
    async def eval_items(self) -> range:
        return range(3)


def settings(url: str, **given: object) -> EnvironmentSettings:
    return EnvironmentSettings(url=url, group_size=1, dir=FOLDER, **given)


@contextmanager
def opened_journal() -> Iterator[Journal]:
    journal = Journal(FOLDER / "journal.jsonl")
    try:
        yield journal
    finally:
        journal.close()


def serve(
    environment: Environment[int],
    read_version: Callable[[], Awaitable[int | None]],
    stop: asyncio.Event | None = None,
) -> int | None:
    """A run without a gateway; the version of the last evaluation that the next process knows of."""

    async def run(journal: Journal) -> None:
        backend = Direct(str(environment.settings.url), None, 10.0, 10.0)
        await Session(
            environment,
            backend,
            journal,
            FOLDER,
            None,
            stop or asyncio.Event(),
            False,
            read_version,
        ).run()
        await backend.close()

    with opened_journal() as journal:
        asyncio.run(run(journal))
    with opened_journal() as journal:
        return journal.evaluated


def evaluated() -> list[int]:
    return sorted(
        int(file.parent.name.removeprefix("evaluate-version-"))
        for file in FOLDER.glob("evaluate-version-*/metrics.json")
    )


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "VERSION_EVERY_S", 0.01)


def test_an_evaluation_uses_all_items_unless_it_is_told_otherwise() -> None:
    with running_server(lambda _: "x") as url:
        everything = asyncio.run(evaluate(Many(settings(url))))
        some = asyncio.run(evaluate(Many(settings(url, eval_items=3))))
    items = [
        json.loads((told.folder / "metrics.json").read_text())["items"]
        for told in (everything, some)
    ]
    assert items == [200, 3]


def test_versions_are_evaluated_from_the_first_to_the_last() -> None:
    """Also the version that ends the run, although it comes while groups run."""
    version = [0]

    async def read() -> int:
        if version[0] % 2 or version[0] in evaluated():
            version[0] += 1
        return version[0]

    with running_server(lambda _: "x") as url:
        last = serve(Few(settings(url, eval_every_versions=2, until_version=4)), read)
    assert evaluated() == [0, 2, 4] and last == 4
    rows = [row for row in lines(FOLDER / "metrics.jsonl") if "eval/version" in row]
    assert [row["eval/version"] for row in rows] == [0, 2, 4]
    assert all(row["eval/reward"] == pytest.approx(1 / 3) for row in rows)


def test_a_version_between_two_that_are_due_is_not_evaluated_again_after_a_restart() -> None:
    async def read() -> int:
        return 3

    with running_server(lambda _: "x") as url:
        chosen = settings(url, eval_every_versions=2, until_version=3)
        for _ in range(2):
            assert serve(Few(chosen), read) == 3
    assert evaluated() == [3] and not (FOLDER / "evaluate-version-3-2").exists()


def test_an_evaluation_that_was_interrupted_is_repeated_by_the_next_process() -> None:
    stop = asyncio.Event()

    class Stopped(Few):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
            if rollout.channel == "val":
                stop.set()
                await asyncio.Event().wait()
            return await super().collect_trajectory(item, rollout)

    async def read() -> int:
        return 7

    with running_server(lambda _: "x") as url:
        chosen = settings(url, eval_every_versions=5, until_version=7, drain_s=0)
        assert serve(Stopped(chosen), read, stop) is None
        assert serve(Few(chosen), read) == 7


def test_before_a_trainer_has_sent_weights_there_is_nothing_to_evaluate() -> None:
    polls = iter([None, None, None])
    stop = asyncio.Event()

    async def read() -> int | None:
        try:
            return next(polls)
        except StopIteration:
            stop.set()
            return None

    with running_server(lambda _: "x") as url:
        assert serve(Few(settings(url, eval_every_versions=1)), read, stop) is None
    assert evaluated() == []


def answering(*versions: str) -> Callable[[], str]:
    """What a gateway says in the answers, one after the other; the last goes on for ever."""
    remaining = list(versions)
    return lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def recorded_versions(folder: Path) -> object:
    return json.loads((folder / "metrics.json").read_text())["versions"]


def test_the_result_says_which_versions_of_the_weights_answered() -> None:
    with running_server(lambda _: "x", answering("1.9", "1.9,1.10", "1.10")) as url:
        result = asyncio.run(evaluate(Few(settings(url, workers=1))))
    assert result.versions == recorded_versions(result.folder) == {"1.9": 2, "1.10": 2}
    row = result.tracker_row()
    names = ("eval/versions", "eval/oldest_version", "eval/newest_version")
    assert [row[name] for name in names] == [2, 9, 10]
    with running_server(lambda _: "x") as url:
        silent = asyncio.run(evaluate(Few(settings(url))))
    assert recorded_versions(silent.folder) == {} and "eval/versions" not in silent.tracker_row()


def test_items_that_older_weights_answered_are_repeated_until_one_version_answered_all() -> None:
    """Two items are answered by version 4, the third by 5; then 4's are repeated."""
    with running_server(lambda _: "x", answering("1.4", "1.4,1.5", "1.5")) as url:
        chosen = settings(url, workers=1, eval_one_version=True)
        result = asyncio.run(evaluate(Few(chosen)))
    assert result.versions == {"1.5": 3}
    samples = lines(result.folder / "samples.jsonl")
    assert [sample["item"] for sample in samples] == [0, 1, 2]
    assert result.metrics["reward"] == pytest.approx(1 / 3)


def test_an_evaluation_at_one_version_fails_if_the_weights_never_stay() -> None:
    versions = iter(range(1_000_000))
    with (
        running_server(lambda _: "x", lambda: f"1.{next(versions)}") as url,
        pytest.raises(EnvironmentFailed, match="The weights changed in every round"),
    ):
        asyncio.run(evaluate(Few(settings(url, eval_one_version=True))))


def test_an_evaluation_at_one_version_needs_answers_that_name_it() -> None:
    with (
        running_server(lambda _: "x") as url,
        pytest.raises(EnvironmentFailed, match="through the gateway"),
    ):
        asyncio.run(evaluate(Few(settings(url, eval_one_version=True))))
