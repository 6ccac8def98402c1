"""From settings to parts: the order, who waits for whom, and where each one is."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from steplog.settings import SettingsError, load
from steplog.stack.plan import StackPlan
from steplog.stack.planner import StackPlanner
from steplog.stack.settings import StackSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "stack.toml"


def planned(text: str, **environ: str) -> StackPlan:
    Path("steplog.toml").write_text(text)
    return StackPlanner(load(StackSettings, "stack", Namespace(), environ), environ).plan()


def test_the_example_is_a_whole_stack() -> None:
    settings = load(StackSettings, "stack", Namespace(config=EXAMPLE), {})
    plan = StackPlanner(settings, {}).plan()
    names = [part.name for part in plan.parts]
    assert names == ["kafka", "engine", "topics", "train", "reward-0", "reward-1", "gateway"]
    urls = {part.name: part.ready for part in plan.parts}
    assert urls["engine"] == "http://127.0.0.1:8000/health"
    assert urls["gateway"] == "http://127.0.0.1:8100/ready"
    assert urls["reward-1"] == "http://127.0.0.1:8201/ready"
    second = plan.part("reward-1")
    assert second is not None and second.command[-4:] == ("--port", "8201", "--slot", "1")
    assert str(EXAMPLE) in second.command
    engine = plan.part("engine")
    assert engine is not None and engine.command[-1] == '{"backend":"steplog_nccl"}'
    assert engine.needs == (), "the slowest does not wait for anybody"
    assert all("topics" in part.needs for part in plan.parts[3:])


def test_brokers_of_ones_own_are_used_and_not_started() -> None:
    plan = planned('bootstrap = "kafka-1:9092"\n[stack]\nservices = []\n')
    (topics,) = plan.parts
    assert topics.command[:5] == (sys.executable, "-P", "-m", "steplog", "topics")
    assert topics.command[-2:] == ("--bootstrap", "kafka-1:9092")
    assert topics.needs == ()
    assert plan.broker is None


def test_the_environment_can_choose_the_brokers_too() -> None:
    assert planned("[stack]\nservices = []\n", STEPLOG_BOOTSTRAP="k:1").broker is None


def test_the_local_broker_may_have_its_address_in_the_file() -> None:
    plan = planned(
        'bootstrap = "127.0.0.1:9999"\n[kafka]\nport = 9999\n[stack]\nkafka = true\nservices = []'
    )
    assert plan.broker is not None and plan.broker.port == 9999
    assert [part.name for part in plan.parts] == ["kafka", "topics"]


def test_an_address_for_everybody_is_asked_on_loopback() -> None:
    plan = planned(
        '[stack]\nservices = ["reward"]\n[reward]\nhost = "0.0.0.0"\nport = 8888\ninsecure = true\n'
    )
    assert plan.parts[-1].url == "http://127.0.0.1:8888"


def test_every_services_problems_are_found() -> None:
    with pytest.raises(SettingsError, match="model is missing"):
        planned('[stack]\nservices = ["train"]\n')
