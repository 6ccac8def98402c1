"""The rollouts of one item, which are compared with each other."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Generic

from steplog.environment.backends.backend import Ending
from steplog.environment.rollouts.rollout import Item, Rollout


@dataclass
class Group(Generic[Item]):
    """The rollouts of one item."""

    number: int
    item: Item
    prompt_uid: str
    rollouts: list[Rollout] = field(default_factory=list)
    waited_s: float = 0.0
    """Seconds for which the gateway made it wait before it could start."""

    @property
    def rewards(self) -> list[float]:
        return [
            rollout.reward
            for rollout in self.rollouts
            if rollout.is_usable and rollout.reward is not None
        ]

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per generated token, measured by its rollouts."""
        tokens = sum(rollout.tokens for rollout in self.rollouts)
        seconds = sum(call.seconds for rollout in self.rollouts for call in rollout.calls)
        return seconds / tokens if tokens else None

    @property
    def failure(self) -> str | None:
        """Why all of its rollouts failed; None if one is usable, or was dropped on purpose."""
        if not all(rollout.is_failed for rollout in self.rollouts):
            return None
        return next((r.reason for r in self.rollouts if r.reason), "no reason was given")

    def advantage(self, rollout: Rollout) -> float | None:
        """The rollout's advantage as in GRPO, for display; the trainer computes its own."""
        rewards = self.rewards
        if rollout.reward is None or not rollout.is_usable or len(rewards) < 2:
            return None
        return (rollout.reward - fmean(rewards)) / (pstdev(rewards) + 1e-6)

    def endings(self) -> dict[str, Ending]:
        """How each trajectory of its rollouts ends, by base URL."""
        return {url: end for rollout in self.rollouts for url, end in rollout.endings().items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "prompt_uid": self.prompt_uid,
            "item": _json_item(self.item),
            "rollouts": [self._rollout_as_json(rollout) for rollout in self.rollouts],
        }

    def _rollout_as_json(self, rollout: Rollout) -> dict[str, Any]:
        return {
            "reward": rollout.reward,
            "rewards": {agent.name: agent.reward for agent in rollout.agents.values()},
            "advantage": self.advantage(rollout),
            "status": rollout.status,
            "reason": rollout.reason,
            "metrics": rollout.metrics,
            "seconds": round(rollout.seconds, 3),
            "tokens": rollout.tokens,
            "conversations": rollout.conversations(),
            "speakers": [name for name, _ in rollout.conversations_by_agent()],
        }


def reward_cut_off_rollouts(rollouts: Sequence[Rollout], reward: float) -> None:
    """Give truncated rollouts without a reward this one, if others of these rollouts have rewards.

    A rollout that was cut off returned none, and without one it would leave its group. Where no rollout
    has a reward, reward workers or the ratings of calls decide."""
    names = {name for rollout in rollouts for name in rollout.agents}
    for name in names:
        agents = {id(rollout): rollout.agents[name] for rollout in rollouts}
        if any(agent.reward is not None for agent in agents.values()):
            for rollout in rollouts:
                agent = agents[id(rollout)]
                if rollout.status == "truncated" and agent.reward is None:
                    agent.reward = reward


def _json_item(item: Any) -> Any:
    """The item, or its text where JSON cannot represent it."""
    try:
        return json.loads(json.dumps(item, allow_nan=False))
    except (TypeError, ValueError):
        return str(item)
