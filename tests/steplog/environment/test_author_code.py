"""Mistakes of authors: each costs no more than it must, and is reported in one sentence with its
line."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steplog import (
    Environment,
    EnvironmentFailed,
    EnvironmentSettings,
    Rollout,
    TryAgain,
    evaluate,
    process,
)
from steplog.environment import commands
from tests.steplog.environment.environments import say
from tests.steplog.environment.openai_server import running_server
from tests.steplog.environment.recorded_log import lines


class Plain(Environment[Any]):
    async def get_next_item(self) -> Any:
        return self.index

    async def eval_items(self) -> Sequence[Any]:
        return [0]

    async def collect_trajectory(self, _: Any, rollout: Rollout) -> Any:
        await say(rollout, "hello")
        return 1.0


def processed(cls: type[Environment[Any]], **given: Any) -> list[dict[str, Any]]:
    """The groups, by number."""
    usual = {"groups": 2, "group_size": 2, "max_failures": 1, "attempts": 2, "dir": Path("kept")}
    with running_server(lambda _: "half of a pair: \ud83d") as url:
        chosen = EnvironmentSettings(url=url, **{**usual, **given})
        folder = asyncio.run(process(cls(chosen)))
    return sorted(lines(folder / "rollouts.jsonl"), key=lambda line: int(line["number"]))


def reasons(line: dict[str, Any]) -> list[str | None]:
    return [rollout["reason"] for rollout in line["rollouts"]]


# Rollouts


def test_code_that_calls_exit_fails_its_rollout_only() -> None:
    class Exits(Plain):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> float:
            await say(rollout, "hello")
            if item == 0:
                sys.exit(3)
            return 1.0

    first, second = processed(Exits, max_failures=2)
    assert str(reasons(first)[0]).startswith("SystemExit: 3 (test_author_code.py:")
    assert reasons(second) == [None, None]


def test_a_rollout_that_cancels_itself_fails_alone() -> None:
    class Cancels(Plain):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> Any:
            if item == 0:
                task = asyncio.create_task(asyncio.sleep(60))
                task.cancel()
                await task
            return await super().collect_trajectory(item, rollout)

    first, second = processed(Cancels, max_failures=2)
    assert str(reasons(first)[0]).startswith("CancelledError (test_author_code.py:")
    assert reasons(second) == [None, None]


def test_of_a_group_of_tasks_the_error_is_told_that_ended_it() -> None:
    class Grouped(Plain):
        async def collect_trajectory(self, _: int, rollout: Rollout) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(say(rollout, "hello"))
                tasks.create_task(self.fail())

        async def fail(self) -> None:
            raise ValueError("two\nlines")

    with pytest.raises(EnvironmentFailed, match=r": ValueError: two lines \(test_author_code.py:"):
        processed(Grouped)


def test_outages_in_a_group_of_tasks_are_retried() -> None:
    class Grouped(Plain):
        async def collect_trajectory(self, _: int, rollout: Rollout) -> float:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.look(rollout))
            return float(rollout.attempt)

        async def look(self, rollout: Rollout) -> None:
            if rollout.attempt == 1:
                raise TryAgain("the shop is closed")

    (line,) = processed(Grouped, groups=1)
    assert [rollout["reward"] for rollout in line["rollouts"]] == [2.0, 2.0]


def test_a_group_that_is_collected_by_hand_and_hangs_ends() -> None:
    class Hangs(Plain):
        async def collect_trajectories(self, *_: Any) -> None:
            await asyncio.Event().wait()

    with pytest.raises(EnvironmentFailed, match=r"its group failed: it took more than 0\.3 s"):
        processed(Hangs, attempts=1, rollout_timeout_s=0.1, patience_s=0.1)


@pytest.mark.parametrize("reward", [(1.0, []), {"score": 1}, "good", 10**400])
def test_a_reward_that_is_no_number_is_told(reward: Any) -> None:
    class Odd(Plain):
        async def collect_trajectory(self, *_: Any) -> Any:
            return reward

    with pytest.raises(EnvironmentFailed, match=r"the reward of agent is .*, not a number"):
        processed(Odd)


def test_a_status_that_nobody_knows_is_told() -> None:
    class Odd(Plain):
        async def collect_trajectory(self, _: int, rollout: Rollout) -> float:
            rollout.status = "done"  # type: ignore[assignment]
            return 1.0

    with pytest.raises(
        EnvironmentFailed, match=r"its status is 'done', which is none of completed, "
    ):
        processed(Odd)


def test_metrics_that_are_no_numbers_are_left_out_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(Plain):
        async def collect_trajectory(self, item: int, rollout: Rollout) -> Any:
            odd: Any = {"word": "x", "nothing": None, "nan": float("nan"), "turns": 3}
            rollout.metrics = odd
            return await super().collect_trajectory(item, rollout)

        async def metrics(self) -> Any:
            return {"object": object(), "level": 2}

    groups = processed(Odd)
    assert [r["metrics"] for line in groups for r in line["rollouts"]] == [{"turns": 3}] * 4
    (row,) = lines(Path("kept/process/metrics.jsonl"))
    assert row["turns"] == 3 and row["level"] == 2 and "object" not in row
    told = [record.message for record in caplog.records]
    assert sorted(told) == [
        "metrics(): the value of object is not a finite number and is left out.",
        *(
            f"rollout.metrics: the value of {name} is not a finite number and is left out."
            for name in ("nan", "nothing", "word")
        ),
    ]


def test_half_of_a_pair_of_surrogates_is_kept_as_text() -> None:
    line, _ = processed(Plain)
    said = line["rollouts"][0]["conversations"][0][-1]["content"]
    assert said == "half of a pair: \ud83d"
    assert "half of a pair: \\ud83d" in Path("kept/process/rollouts.html").read_text()


def test_the_backlog_is_drawn_after_the_last_item() -> None:
    class Few(Plain):
        async def get_next_item(self) -> int | None:
            return 0 if self.index == 0 else None

        async def collect_trajectory(self, item: Any, rollout: Rollout) -> Any:
            if item == 0:
                self.backlog.append("again")
            return await super().collect_trajectory(item, rollout)

    assert [line["item"] for line in processed(Few, groups=9)] == [0, "again", "again"]


def test_the_backlog_takes_no_item_from_a_data_set() -> None:
    class Held(Plain):
        get_next_item = Environment.get_next_item

        async def setup(self) -> None:
            self.items = range(5)
            self.backlog.extend(["first", "second"])

    drawn = [line["item"] for line in processed(Held, groups=7)]
    assert drawn[:2] == ["first", "second"] and sorted(drawn[2:]) == [0, 1, 2, 3, 4]


# The class


def mistaken(**methods: Any) -> type[Plain]:
    return type("Mistaken", (Plain,), methods)


def raising(*_: Any) -> Any:
    raise LookupError("no such row")


async def raising_later(*_: Any) -> Any:
    raise LookupError("no such row")


async def nothing(*_: Any) -> None:
    pass


async def yielding(*_: Any) -> Any:
    yield 1


RAISED = r"LookupError: no such row \(test_author_code.py:"


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({"setup": raising_later}, rf"^setup\(\) failed: {RAISED}"),
        ({"get_next_item": raising_later}, rf"^get_next_item\(\) failed: {RAISED}"),
        ({"metadata": raising}, rf"^metadata\(\) failed: {RAISED}"),
        ({"metadata": lambda *_: {"a": object()}}, r"^metadata\(\) failed: TypeError: Object of"),
        ({"state_dict": raising}, rf"^state_dict\(\) failed: {RAISED}"),
        (
            {"get_next_item": raising},
            "^get_next_item of Mistaken must be an `async def` that returns",
        ),
        ({"score": lambda *_: None}, "^score of Mistaken must be an `async def` that returns"),
        ({"__init__": lambda *_: None}, "^__init__ of Mistaken must call super"),
        ({"agents": "buyer"}, "^`agents` of Mistaken must be a tuple of distinct names"),
        ({"agents": ()}, "^`agents` of Mistaken must be a tuple of distinct names"),
        ({"agents": ("a", "a")}, "^`agents` of Mistaken must be a tuple of distinct names"),
        (
            {"collect_trajectory": Environment.collect_trajectory},
            "must define `async def collect_traj",
        ),
        ({"get_next_item": Environment.get_next_item}, "^mistaken has no items. "),
    ],
)
def test_a_mistake_in_the_class_is_one_sentence(methods: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvironmentFailed, match=sentence):
        processed(mistaken(**methods), max_failures=100)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({"eval_items": raising_later}, rf"^eval_items\(\) failed: {RAISED}"),
        ({"eval_items": yielding}, "^eval_items of Mistaken must be an `async def` that returns"),
        ({"evaluate": raising_later}, rf"^evaluate\(\) failed: {RAISED}"),
        ({"evaluate": nothing}, r"^evaluate\(\) must map names to numbers, but is a NoneType"),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_sentence(methods: dict[str, Any], sentence: str) -> None:
    with running_server(lambda _: "x") as url, pytest.raises(EnvironmentFailed, match=sentence):
        asyncio.run(evaluate(mistaken(**methods)(EnvironmentSettings(url=url, dir=Path("kept")))))


def test_an_end_that_fails_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvironmentFailed, match=r"^setup\(\) failed"):
        processed(mistaken(setup=raising_later, cleanup=raising_later))
    assert [r.message.partition(": ")[0] for r in caplog.records] == ["cleanup() failed"]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (
            "settings: 'Nowhere'",
            1,
            "An annotation of Mine cannot be evaluated: name 'Nowhere' is not",
        ),
        ("settings: dict", 1, "`settings` of Mine must be annotated with a subclass of"),
        ("def __init__(self): pass", 1, "Mine(settings) failed: TypeError: "),
    ],
)
def test_a_class_that_cannot_be_made_is_one_sentence(
    capsys: pytest.CaptureFixture[str], body: str, status: int, sentence: str
) -> None:
    Path("mine.py").write_text(
        f"from steplog import Environment\nclass Mine(Environment):\n    {body}\n"
    )
    assert commands.run(["mine.py:Mine", "process"]) == status
    told = capsys.readouterr().err
    assert told.startswith(sentence) and len(told.splitlines()) == 1


def test_a_file_that_runs_itself_when_it_is_loaded_is_told_how_not_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.py").write_text("raise SystemExit(2)\n")
    assert commands.run(["mine.py:Mine", "process"]) == 2
    assert 'Put its call of .cli() under `if __name__ == "__main__":`' in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    with running_server(lambda _: "x") as url:
        words = ["process", "--url", url, "--dir", "taken"]
        assert commands.main(Plain, words) == 1
    assert capsys.readouterr().err == "taken/process cannot be used: Not a directory\n"
