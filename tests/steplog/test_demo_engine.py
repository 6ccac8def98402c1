"""On which devices the demo runs. Test machines have no GPU, so the number of GPUs is given."""

import shlex

import pytest

from steplog.demo import engine
from steplog.demo.engine import DemoEngine, choose_engine


def chosen(monkeypatch: pytest.MonkeyPatch, gpus: int, *, gpu_build: bool = True) -> DemoEngine:
    monkeypatch.setattr(engine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(engine, "_has_vllm_for_gpus", lambda: gpu_build)
    return choose_engine()


def environment(demo_engine: DemoEngine) -> dict[str, str]:
    words = shlex.split(demo_engine.command("model", "127.0.0.1", 8000))
    return dict(word.split("=", 1) for word in words[1:] if word[0].isupper() and "=" in word)


@pytest.mark.parametrize(("gpus", "gpu_build"), [(0, True), (1, False)])
def test_without_a_gpu_or_vllms_build_for_it_the_cpu_is_used(
    monkeypatch: pytest.MonkeyPatch, gpus: int, gpu_build: bool
) -> None:
    assert chosen(monkeypatch, gpus, gpu_build=gpu_build) == engine.on_cpu()


def test_on_one_gpu_nccl_takes_trainer_and_engine_for_two_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demo_engine = chosen(monkeypatch, 1)
    hosts = environment(demo_engine)["NCCL_HOSTID"], demo_engine.trainer_variables["NCCL_HOSTID"]
    assert hosts[0] != hosts[1]
    assert demo_engine.trainer_settings["weights_transport"] == "nccl"


@pytest.mark.parametrize(("visible", "second"), [(None, "1"), ("4,6", "6")])
def test_on_two_gpus_the_engine_has_the_second(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, second: str
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    demo_engine = chosen(monkeypatch, 2)
    assert environment(demo_engine)["CUDA_VISIBLE_DEVICES"] == second
    assert "NCCL_HOSTID" not in environment(demo_engine), "two GPUs of a machine are connected"
