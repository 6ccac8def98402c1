"""The demo's own logic, quickly; and the whole of it, slowly."""

import io
import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from schemas import Decision, Outcome, PolicyVersion, Position, Segment, Step, TrajectoryEnd
from schemas.packing import pack_ids, pack_logprobs
from schemas.records import DecidedGroup
from steplog.demo import model
from steplog.demo.agent import ChatLine, find_key
from steplog.demo.log_watch import LogWatch
from steplog.demo.task import ASK, PEOPLE, TURNS, Search, conversation, format_turn, score
from steplog.demo.view import CHART_ROWS, DemoView, chart
from steplog.stack.state import StackFolder
from tests.steplog.command import STEPLOG, steplog

SEARCH = Search("ann", "bob", "barn")


class Said(NamedTuple):
    text: str


class Scored(NamedTuple):
    steps: list[Said]
    metadata: dict[str, Any]


def scored(*words: str, form: Any = format_turn) -> float:
    steps = [Said(form(turn, word)) for turn, word in enumerate(words)]
    return score(Scored(steps, {"words": list(SEARCH.words)}))


def test_a_reward_is_the_share_of_right_turns() -> None:
    assert scored("ann", "bob", "barn") == 1
    assert scored("ann", "bob", "hall") == pytest.approx(2 / 3)
    assert scored("ann", "eva") == pytest.approx(1 / 3)
    assert scored("bob") == 0
    assert scored("bob", "bob", "barn") == 0, "what comes after a mistake does not count"
    assert scored("ann", "bob", form=lambda turn, word: word) == 0, "the form counts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_words_are_tokens_and_the_template_writes_calls_as_the_model_does(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        conversation(SEARCH, SEARCH.words), tools=[ASK], tokenize=False
    )
    for turn, word in enumerate(SEARCH.words):
        assert f"assistant\n{format_turn(turn, word)}<|im_end|>" in text
        assert len(tokenizer.encode(word)) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(format_turn(0, "ann"))) == 5


def test_the_warm_start_teaches_the_form_and_seldom_the_word(tokenizer: Any) -> None:
    examples, rng = model.WarmStartExamples(tokenizer), random.Random(3)
    rows = [examples.draw(rng) for _ in range(600)]
    assert {len(row) for row in rows} == {len(examples.is_target)}
    texts = [tokenizer.decode(row) for row in rows]
    right = sum(format_turn(0, asked) in text for text in texts if (asked := _asked(text)))
    by_chance = model.RIGHT_SHARE + (1 - model.RIGHT_SHARE) / len(PEOPLE)
    assert right / len(rows) < by_chance + 0.15
    learned = [i for i, learns in zip(rows[0], examples.is_target, strict=True) if learns]
    assert tokenizer.decode(learned).count("<|im_end|>") == TURNS


def _asked(text: str) -> str:
    return text.partition("Ask ")[2].partition("<|im_end|>")[0]


class Completions:
    """Says what it was told to, as OpenAI's client would give it."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)
        self.prompts: list[list[Any]] = []
        self.chat = self.completions = self

    async def create(self, messages: list[Any], **_: Any) -> Any:
        self.prompts.append(list(messages))
        return _Answer(self.words.pop(0))


class _Answer:
    def __init__(self, word: str) -> None:
        from openai.types.chat import ChatCompletionMessage

        call: Any = {"name": "ask", "arguments": json.dumps({"who": word})}
        calls = [{"id": "c", "type": "function", "function": call}] if word in PEOPLE else None
        content = None if calls else word
        self.message = ChatCompletionMessage.model_validate(
            {"role": "assistant", "content": content, "tool_calls": calls}
        )
        self.choices = [self]


async def test_the_agent_uses_the_tool_until_the_model_answers() -> None:
    client = Completions("ann", "bob", "barn")
    heard = await find_key(client, SEARCH)  # type: ignore[arg-type]
    assert [line.role for line in heard] == ["user", "model", "tool", "model", "tool", "model"]
    assert heard[-1] == ChatLine("model", "barn")
    assert [len(prompt) for prompt in client.prompts] == [1, 3, 5]


@pytest.mark.parametrize("words", [("bob",), ("hall",), ("ann", "ann")])
async def test_the_agent_stops_at_the_first_mistake(words: tuple[str, ...]) -> None:
    client = Completions(*words)
    heard = await find_key(client, SEARCH)  # type: ignore[arg-type]
    assert heard[-1].role == "model"
    assert not client.words


def step(trajectory: str, version: int) -> Step:
    return Step(
        step_id=f"{trajectory}-0",
        trajectory_uid=trajectory,
        prompt_uid="p",
        step_index=0,
        run="demo",
        prompt_ids=b"",
        response_ids=pack_ids([1, 2]),
        response_logprobs=pack_logprobs([-1.0, -1.0]),
        segments=[Segment(incarnation=1, version=version, first_token=0)],
    )


def end(trajectory: str, reward: float | None) -> TrajectoryEnd:
    return TrajectoryEnd(
        end_id=trajectory,
        trajectory_uid=trajectory,
        prompt_uid="p",
        run="demo",
        status="completed",
        steps=1,
        reward=reward,
        source=Position(partition=0, offset=0),
    )


def watched(rewards: dict[int, list[float]]) -> LogWatch:
    watch = LogWatch()
    for version, found in rewards.items():
        for number, reward in enumerate(found):
            watch.add_conversation(
                f"{version}-{number}", [ChatLine("user", "Where is the key? Ask ann")]
            )
            watch.apply(step(f"{version}-{number}", version))
            watch.apply(end(f"{version}-{number}", reward))
    return watch


def test_rewards_belong_to_the_version_that_sampled() -> None:
    watch = watched({0: [0.0, 1.0], 2: [1.0]})
    assert watch.curve == [0.5, 0.5, 1.0]
    watch.apply(step("x", 2))
    watch.apply(end("x", None))
    assert watch.curve == [0.5, 0.5, 1.0], "no reward is not a reward of 0"
    assert watch.steps == 4


def test_versions_and_groups_are_counted_from_the_log() -> None:
    watch = LogWatch()
    watch.apply(PolicyVersion(run="demo", incarnation=2, version=3, phase="opened"))
    assert watch.live is None
    watch.apply(PolicyVersion(run="demo", incarnation=2, version=3, phase="live", created_at=1))
    assert not watch.is_fresh, "that was an earlier run's"
    now = int(time.time() * 1000) + 1
    watch.apply(PolicyVersion(run="demo", incarnation=2, version=3, phase="live", created_at=now))
    assert watch.is_fresh
    groups = [
        DecidedGroup(prompt_uid="p", partition=0, first_offset=0, closed_at=0, verdict=verdict)
        for verdict in ("train", "no_variance", "train")
    ]
    watch.apply(Decision(run="demo", incarnation=2, sequence=1, version=3, groups=groups))
    watch.apply(Outcome(run="demo", incarnation=2, sequence=1, version=3, metrics={"loss": 1.0}))
    assert (watch.live, watch.incarnation, watch.trained_groups) == (3, 2, 2)
    assert watch.outcomes[3].metrics == {"loss": 1.0}


def test_chance_is_not_learning_and_a_climb_is() -> None:
    chance = random.Random(5)
    flat = {version: [chance.random() for _ in range(64)] for version in range(16)}
    climbing = {v: [r * 0.5 + v / 32 for r in found] for v, found in flat.items()}
    for rewards, is_real in ((flat, False), (climbing, True)):
        gain = watched(rewards).reward_gain()
        assert gain is not None and gain.is_real is is_real
    assert watched({0: [1.0, 0.0]}).reward_gain() is None


def test_the_chart_goes_from_0_to_1() -> None:
    rows = [row.plain for row in chart([0.0, 0.5, 1.0], 3, 12)]
    assert len(rows) == CHART_ROWS
    assert rows[0] == "1.0 │        ████"
    assert rows[-1] == "0.0 │    ████████"
    assert chart([1.0] * 100, 100, 20)[0].plain == "1.0 │" + "█" * 20


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_view_fits(tmp_path: Path, width: int) -> None:
    watch = watched({version: [version / 40] * 4 for version in range(40)})
    watch.apply(PolicyVersion(run="demo", incarnation=1, version=40, phase="live"))
    console = Console(width=width, height=30, record=True, file=io.StringIO())
    console.print(DemoView(watch, StackFolder(tmp_path), 40))
    text = console.export_text()
    assert "version 40 of 40" in text
    assert "Where is the key? Ask ann" in text
    assert len(text.splitlines()) <= 30


@pytest.mark.heavy
def test_foreign_files_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").write_text("mine")
    told = steplog("demo", "--dir", "here")
    assert told.returncode == 1
    assert "not the demo's" in told.stderr
    assert (tmp_path / "here" / "thesis.txt").exists()


@pytest.mark.heavy
def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    told = steplog("demo", "--resume")
    assert told.returncode == 1
    assert "There is no earlier run in" in told.stderr


def whole_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return steplog("demo", *options, COLUMNS="100")


@pytest.mark.proof
@pytest.mark.broker
@pytest.mark.timeout(1800)
def test_the_whole_demo_learns_and_goes_on(tmp_path: Path) -> None:
    told = whole_demo("--versions", "10")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "The model learned." in told.stdout
    assert (tmp_path / ".steplog/demo/checkpoints/demo").is_dir()
    assert steplog("status", "--dir", ".steplog/demo/stack").returncode == 1, "all is ended"
    again = whole_demo("--resume", "--versions", "4")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "versions  14" in again.stdout


@pytest.mark.proof
@pytest.mark.broker
@pytest.mark.timeout(1800)
def test_without_a_learning_rate_nothing_is_learned(tmp_path: Path) -> None:
    told = whole_demo("--versions", "8", "--learning-rate", "0")
    assert told.returncode == 1, told.stdout + told.stderr
    assert "The model did not learn." in told.stdout


@pytest.mark.slow
@pytest.mark.broker
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    process = subprocess.Popen(
        [STEPLOG, "demo"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process.stdout as told:
        assert any("engine: starting" in line for line in iter(told.readline, ""))
        process.send_signal(signal.SIGINT)
        said = told.read()
        assert process.wait() == 130, said
    assert "Traceback" not in said
    assert not StackFolder(tmp_path / ".steplog/demo/stack").is_supervised()
    assert steplog("kafka", "status", "--config", ".steplog/demo/steplog.toml").returncode == 1
