"""Environments for tests, run as a user runs them: each is a process of its own."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from steplog import Environment, EnvironmentSettings, Rollout, TryAgain
from tests import processes

ROOT = Path(__file__).parents[3]


async def say(rollout: Rollout, text: str, agent: str = "agent") -> str:
    answer = await rollout.agent(agent).client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": text}], max_tokens=16
    )
    return answer.choices[0].message.content or ""


class Counting(Environment[int]):
    """Item n asks about n, once or several times."""

    class Settings(EnvironmentSettings):
        turns: int = Field(1, ge=1)

    settings: Settings

    async def get_next_item(self) -> int:
        return self.index

    async def eval_items(self) -> range:
        return range(4)

    def metadata(self, item: int) -> dict[str, Any]:
        return {"item": item}

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float | None:
        for turn in range(self.settings.turns):
            await say(rollout, f"{item} {turn}")
        return float(self.random.random() < 0.5)


class Faulty(Counting):
    """Rollouts fail in every way there is; each of them alone."""

    kinds: Sequence[str] = ("fine", "raises", "hangs", "nan", "again", "never")

    async def collect_trajectories(self, item: int, rollouts: Sequence[Rollout]) -> None:
        kinds = dict(zip(map(id, rollouts), self.kinds, strict=True))

        async def collect(item: int, rollout: Rollout) -> float:
            await say(rollout, f"{item}")
            match kinds[id(rollout)]:
                case "raises":
                    raise ValueError("<b>not my day</b>")
                case "hangs":
                    await asyncio.sleep(3600)
                case "nan":
                    return float("nan")
                case "again" if rollout.attempt == 1:
                    raise TryAgain("the shop is closed")
                case "never":
                    raise TryAgain("the shop is closed for ever")
            return 1.0

        await asyncio.gather(*(rollout.run(collect, item) for rollout in rollouts))


class Market(Counting):
    """Two agents, who are trained apart."""

    agents = ("buyer", "seller")

    async def collect_trajectory(self, _: int, rollout: Rollout) -> None:
        await say(rollout, "What is it worth?", "buyer")
        await say(rollout, "Is that all?", "seller")
        rollout.agent("buyer").reward = 1.0
        rollout.agent("seller").reward = -1.0


class Examined(Counting):
    """Its evaluations never end."""

    async def collect_trajectory(self, item: int, rollout: Rollout) -> float | None:
        reward = await super().collect_trajectory(item, rollout)
        if rollout.channel == "val":
            self.note()
            await asyncio.Event().wait()
        return reward

    def note(self) -> None:
        Path("examined").touch()


class Broken(Counting):
    async def collect_trajectory(self, *_: Any) -> float:
        raise RuntimeError("the simulator is not installed")


def running(name: str, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", __name__, name, *words]
    return processes.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=-1, stderr=-1, text=True)


def run(name: str, *words: str) -> "subprocess.CompletedProcess[str]":
    process = running(name, *words)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess([name], process.returncode, out, err)


if __name__ == "__main__":
    globals()[sys.argv[1]].cli(sys.argv[2:])
