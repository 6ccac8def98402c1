"""The class that authors of environments write a subclass of."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from inspect import iscoroutinefunction, unwrap
from random import Random
from statistics import fmean, stdev
from typing import Any, ClassVar, Generic, NoReturn, get_type_hints

from steplog.environment.authors import blamed
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.group import Group
from steplog.environment.rollout import Item, Rollout, run_all
from steplog.environment.settings import EnvironmentSettings

Json = dict[str, Any]


class Environment(Generic[Item]):
    """Tasks for a model, and what its tries are worth.

    A subclass needs `collect_trajectory`, and either `get_next_item` or `items`. Its own settings are
    a subclass of EnvironmentSettings, told by one annotation: `settings: MySettings`.
    """

    settings: EnvironmentSettings
    name: ClassVar[str] = ""
    """In the log, in files and at trackers; by default the class's, as words with dashes."""
    agents: ClassVar[Sequence[str]] = ("agent",)
    """Voices that are trained apart: each has its own trajectory in a rollout, and its own group."""

    def __init__(self, settings: EnvironmentSettings | None = None) -> None:
        self.settings = settings or settings_class(type(self))()
        self.items: Sequence[Item] = ()
        """A data set, if there is one: each epoch goes through it in an order of its own."""
        self.backlog: deque[Item] = deque()
        """Items that come before all others. A kill forgets them, unless `state_dict` has them."""
        self.index = 0
        """The number of the item that comes next, not counting the backlog's: those take nothing from
        the stream. The same again after a restart."""
        self.random = Random(0)
        """Made anew for every item of the stream, from the seed and `index`: draw from it, and a
        restart goes on."""

    # The stream of items

    async def setup(self) -> None:
        """Once, before anything else."""

    async def get_next_item(self) -> Item | None:
        """The next item; None when there are no more, ever."""
        if not self.items:
            return None
        epoch, place = divmod(self.index, len(self.items))
        order = list(range(len(self.items)))
        Random(f"{self.settings.seed}/epoch/{epoch}").shuffle(order)
        return self.items[order[place]]

    def metadata(self, item: Item) -> Mapping[str, Any]:  # noqa: ARG002
        """What the log has of an item besides its calls, such as the answer for a reward worker."""
        return {}

    # Rollouts

    async def collect_trajectory(self, item: Item, rollout: Rollout) -> float | None:  # noqa: ARG002
        """One try: talk to `rollout.client`, and return the reward. None leaves it to a reward worker.
        What it raises fails this rollout alone."""
        raise TypeError(f"{type(self).__name__} has no collect_trajectory")

    async def collect_trajectories(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """All tries at an item, by default at the same time."""
        await run_all(self.collect_trajectory, item, rollouts)

    async def score(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """Sees the whole group before it is closed, and may change rewards."""

    # Evaluation

    async def eval_items(self) -> Iterable[Item]:
        """What is held out. Their rollouts go to the channel `val`."""
        return ()

    async def evaluate(self, groups: Sequence[Group[Item]]) -> Mapping[str, float]:
        """What an evaluation says, given its groups: by default means of rewards and metrics."""
        usable = [rollout for group in groups for rollout in group.rollouts if rollout.is_usable]
        rewards = [rollout.reward for rollout in usable if rollout.reward is not None]
        told: dict[str, float] = {}
        if rewards:
            told["reward"] = fmean(rewards)
        if len(rewards) > 1:
            told["reward_stderr"] = stdev(rewards) / len(rewards) ** 0.5
        best = [max(found) for group in groups if (found := group.rewards)]
        if best and any(len(group.rollouts) > 1 for group in groups):
            told["reward_best"] = fmean(best)
        names = {name for rollout in usable for name in rollout.metrics}
        for name in sorted(names):
            told[name] = fmean(r.metrics[name] for r in usable if name in r.metrics)
        return told

    # What is reported and kept

    async def metrics(self) -> Mapping[str, float]:
        """Values of the author's for each row of metrics, besides the rollouts' own."""
        return {}

    def table_row(self, item: Item, rollout: Rollout) -> Mapping[str, Any]:
        """A row of the rollout table at trackers."""
        said = [messages[-1].get("content") or "" for messages in rollout.conversations()]
        return {
            "item": str(item),
            "said": "\n\n".join(map(str, said)),
            "reward": rollout.reward,
            "status": rollout.status,
        }

    def state_dict(self) -> Json:
        """What the stream of items depends on besides the seed and `index`; JSON."""
        return {}

    def load_state_dict(self, state: Json) -> None:
        """The counterpart; called once after `setup` if there is a state."""

    async def cleanup(self) -> None:
        """Once at the end, whatever happened."""

    # For whoever runs it

    async def draw(self) -> Item | None:
        if self.backlog:
            return self.backlog.popleft()
        self.random = Random(f"{self.settings.seed}/{self.index}")
        with blamed("get_next_item()"):
            item = await self.get_next_item()
        if item is not None:
            self.index += 1
        return item

    def state(self) -> Json:
        """What a restart needs to draw the same items from here on."""
        with blamed("state_dict()"):
            return {"index": self.index, "own": self.state_dict()}

    def restore(self, state: Json) -> None:
        self.index = state["index"]
        if state["own"]:
            with blamed("load_state_dict()"):
                self.load_state_dict(state["own"])

    @classmethod
    def title(cls) -> str:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        return cls.name or words.strip("_")

    @classmethod
    def cli(cls, argv: Sequence[str] | None = None) -> NoReturn:
        """`serve`, `process` and `evaluate`, with every setting as an option."""
        from steplog.environment.commands import main

        raise SystemExit(main(cls, argv))


def settings_class(environment: type[Environment[Any]]) -> type[EnvironmentSettings]:
    """As the class's annotation of `settings` says."""
    try:
        found = get_type_hints(environment)["settings"]
    except Exception as error:  # an annotation may be any expression
        raise EnvironmentFailed(
            f"an annotation of {environment.__name__} cannot be read: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, EnvironmentSettings)):
        raise EnvironmentFailed(
            f"`settings` of {environment.__name__} must be annotated with a subclass of "
            "EnvironmentSettings"
        )
    return found


ASYNCHRONOUS = (
    *("setup", "get_next_item", "collect_trajectory", "collect_trajectories", "score"),
    *("eval_items", "evaluate", "metrics", "cleanup"),
)


def check(environment: Environment[Any]) -> None:
    """What would fail every rollout is better said before the first."""
    cls = type(environment)
    for name in ASYNCHRONOUS:
        if not iscoroutinefunction(unwrap(getattr(cls, name))):
            raise EnvironmentFailed(
                f"{name} of {cls.__name__} must be written with `async def`, and return, not yield"
            )
    if not _collects(cls):
        raise EnvironmentFailed(
            f"{cls.__name__} needs `async def collect_trajectory(self, item, rollout)`"
        )
    if not hasattr(environment, "backlog"):
        raise EnvironmentFailed(f"__init__ of {cls.__name__} must call super().__init__(settings)")
    names = cls.agents
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise EnvironmentFailed(
            f"`agents` of {cls.__name__} must be a tuple of different names, as "
            '("buyer", "seller") or ("agent",)'
        )


def _collects(cls: type[Environment[Any]]) -> bool:
    names = ("collect_trajectory", "collect_trajectories")
    return any(getattr(cls, name) is not getattr(Environment, name) for name in names)
