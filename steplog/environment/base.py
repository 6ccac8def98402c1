"""What the SDK calls on an environment, with the defaults of everything that authors may override."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from inspect import iscoroutinefunction, unwrap
from random import Random
from statistics import fmean, stdev
from typing import Any, ClassVar, Generic, get_type_hints

from openai import AsyncOpenAI

from steplog.environment.author_code import required_call
from steplog.environment.backends.judge import judge_client
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Item, Rollout, run_all
from steplog.environment.settings import EnvironmentSettings

Json = dict[str, Any]


class BaseEnvironment(Generic[Item]):
    """An environment without its command line; `Environment` is what authors subclass."""

    settings: EnvironmentSettings
    name: ClassVar[str] = ""
    """The name in the log, in files and in trackers; by default the class name in kebab-case."""
    agents: ClassVar[Sequence[str]] = ("agent",)
    """Agents that are trained separately: each has its own trajectory in a rollout, and its own
    group."""

    def __init__(self, settings: EnvironmentSettings | None = None) -> None:
        self.settings = settings or settings_class(type(self))()
        self.items: Sequence[Item] = ()
        """The data set, if there is one; it is shuffled anew for each epoch."""
        self.backlog: deque[Item] = deque()
        """Items that are drawn before all others. They are lost in a kill, unless `state_dict`
        keeps them."""
        self.index = 0
        """The number of the next item, which survives restarts. Items of the backlog do not count."""
        self.random = Random(0)
        """Seeded anew for every item from the seed and `index`, so that a restart draws the same
        items."""

    @cached_property
    def judge(self) -> AsyncOpenAI:
        """A client of the second model at `--judge-url`. Its calls are neither recorded nor trained;
        the model's name is `self.settings.judge_model`."""
        return judge_client(self.settings)

    # The stream of items

    async def setup(self) -> None:
        """Called once, before anything else."""

    async def get_next_item(self) -> Item | None:
        """The next item; None when there are no more."""
        if not self.items:
            return None
        epoch, position = divmod(self.index, len(self.items))
        order = list(range(len(self.items)))
        Random(f"{self.settings.seed}/epoch/{epoch}").shuffle(order)
        return self.items[order[position]]

    def metadata(self, item: Item) -> Mapping[str, Any]:  # noqa: ARG002
        """What is recorded about an item besides its calls, such as the right answer for a reward
        worker."""
        return {}

    # Rollouts

    async def collect_trajectory(self, item: Item, rollout: Rollout) -> float | None:  # noqa: ARG002
        """One attempt: talk to `rollout.client` and return the reward, or None to leave scoring to a
        reward worker. An exception fails this rollout only."""
        raise TypeError(f"{type(self).__name__} does not define collect_trajectory")

    async def collect_trajectories(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """All attempts at an item, by default concurrently."""
        await run_all(self.collect_trajectory, item, rollouts)

    async def score(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """Called with the complete group before it is closed; may change rewards, and leave out
        rollouts with `rollout.drop(reason)`. `rollout.tokens` and `rollout.calls` have the lengths."""

    # Evaluation

    async def eval_items(self) -> Iterable[Item]:
        """Held-out items; an evaluation uses all of them. Their rollouts go to the channel `val`."""
        return ()

    async def evaluate(self, groups: Sequence[Group[Item]]) -> Mapping[str, float]:
        """The metrics of an evaluation, from its groups: by default the means of rewards and
        metrics."""
        usable = [rollout for group in groups for rollout in group.rollouts if rollout.is_usable]
        rewards = [rollout.reward for rollout in usable if rollout.reward is not None]
        values: dict[str, float] = {}
        if rewards:
            values["reward"] = fmean(rewards)
        if len(rewards) > 1:
            values["reward_stderr"] = stdev(rewards) / len(rewards) ** 0.5
        best = [max(group.rewards) for group in groups if group.rewards]
        if best and any(len(group.rollouts) > 1 for group in groups):
            values["reward_best"] = fmean(best)
        names = {name for rollout in usable for name in rollout.metrics}
        for name in sorted(names):
            values[name] = fmean(r.metrics[name] for r in usable if name in r.metrics)
        return values

    # Reports and state

    async def metrics(self) -> Mapping[str, float]:
        """Additional values for each row of metrics."""
        return {}

    def table_row(self, item: Item, rollout: Rollout) -> Mapping[str, Any]:
        """A row of the rollout table in trackers."""
        answers = [messages[-1].get("content") or "" for messages in rollout.conversations()]
        return {
            "item": str(item),
            "said": "\n\n".join(map(str, answers)),
            "reward": rollout.reward,
            "status": rollout.status,
        }

    def state_dict(self) -> Json:
        """What the stream of items depends on besides the seed and `index`, as JSON values."""
        return {}

    def load_state_dict(self, state: Json) -> None:
        """Restore what `state_dict` returned; called once after `setup` if there is a state."""

    async def cleanup(self) -> None:
        """Called once at the end, also after an error."""

    # Called by the SDK

    async def draw(self) -> Item | None:
        """The next item, from the backlog first."""
        if self.backlog:
            return self.backlog.popleft()
        self.random = Random(f"{self.settings.seed}/{self.index}")
        with required_call("get_next_item()"):
            item = await self.get_next_item()
        if item is not None:
            self.index += 1
        return item

    def state(self) -> Json:
        """What a restart needs to draw the same items from here."""
        with required_call("state_dict()"):
            return {"index": self.index, "own": self.state_dict()}

    def restore(self, state: Json) -> None:
        self.index = state["index"]
        if state["own"]:
            with required_call("load_state_dict()"):
                self.load_state_dict(state["own"])

    @classmethod
    def title(cls) -> str:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        return cls.name or words.strip("_")


def settings_class(environment: type[BaseEnvironment[Any]]) -> type[EnvironmentSettings]:
    """The class that the environment annotates its `settings` with."""
    try:
        annotated = get_type_hints(environment)["settings"]
    except Exception as error:  # an annotation may be any expression
        raise EnvironmentFailed(
            f"An annotation of {environment.__name__} cannot be evaluated: {error}"
        ) from error
    if not (isinstance(annotated, type) and issubclass(annotated, EnvironmentSettings)):
        raise EnvironmentFailed(
            f"`settings` of {environment.__name__} must be annotated with a subclass of "
            "EnvironmentSettings."
        )
    return annotated


ASYNC_METHODS = (
    *("setup", "get_next_item", "collect_trajectory", "collect_trajectories", "score"),
    *("eval_items", "evaluate", "metrics", "cleanup"),
)


def check(environment: BaseEnvironment[Any]) -> None:
    """Report mistakes that would fail every rollout before the first one starts."""
    cls = type(environment)
    for name in ASYNC_METHODS:
        if not iscoroutinefunction(unwrap(getattr(cls, name))):
            raise EnvironmentFailed(
                f"{name} of {cls.__name__} must be an `async def` that returns, not a generator."
            )
    if not _has_collect(cls):
        raise EnvironmentFailed(
            f"{cls.__name__} must define `async def collect_trajectory(self, item, rollout)`."
        )
    if not hasattr(environment, "backlog"):
        raise EnvironmentFailed(f"__init__ of {cls.__name__} must call super().__init__(settings).")
    names = cls.agents
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise EnvironmentFailed(
            f"`agents` of {cls.__name__} must be a tuple of distinct names, such as "
            '("buyer", "seller") or ("agent",).'
        )


def _has_collect(cls: type[BaseEnvironment[Any]]) -> bool:
    names = ("collect_trajectory", "collect_trajectories")
    return any(getattr(cls, name) is not getattr(BaseEnvironment, name) for name in names)
