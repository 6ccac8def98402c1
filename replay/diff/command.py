"""`steplog replay diff`: compares two sets of rewards, and what training on the other would change."""

from collections.abc import Callable, Iterator, Mapping

import msgspec
from rich.console import Console

from pool import topics
from pool.core.groups import GroupRules
from pool.core.trajectories import StrayRecord, Trajectory
from pool.readers.dataset import Dataset
from pool.readers.scan import OffsetRange
from pool.readers.selection import SelectionSettings, find_ranges
from pool.topics import STEPS, rewarded_topic
from replay.diff.comparison import Comparer, Comparison, Distribution, FunctionRewards
from replay.diff.paired_rewards import RewardPairs, Side
from replay.diff.statistics import Moments
from replay.diff.table import DiffTable
from replay.settings import DiffSettings
from schemas import Position
from servicekit.command_line import print_line


def diff(settings: DiffSettings, say: Callable[[str], None] = print_line) -> None:
    comparison = compare(settings)
    if settings.json_:
        say(msgspec.json.encode(comparison).decode())
    else:
        Console(highlight=False).print(DiffTable(comparison))


def compare(settings: DiffSettings) -> Comparison:
    sides: dict[Side, str] = {
        "old": rewarded_topic(settings.rewards),
        "new": rewarded_topic(settings.with_),
    }
    layouts = topics.check(settings)
    for topic in sides.values():
        topics.check_rewarded_topic(layouts, settings, topic)
    ranges = find_ranges(settings, STEPS, settings).by_partition
    pairs, functions = RewardPairs(), FunctionStatistics()
    for side, topic in sides.items():
        for item in _items(settings, topic, ranges):
            pairs.add(side, item)
            functions.add(side, item)
    rules = GroupRules(
        channel=settings.channel, group_size=settings.group_size, quorum=settings.quorum
    )
    comparer = Comparer(rules, settings.limit)
    for of_prompt in pairs.by_prompt():
        comparer.add(of_prompt)
    old, new = (settings.topic_name(topic) for topic in sides.values())
    return comparer.comparison(old, new, functions.rewards())


def _items(
    settings: DiffSettings, topic: str, ranges: Mapping[int, OffsetRange]
) -> Iterator[Trajectory | StrayRecord]:
    """The range is given in offsets of `steps`, so the whole topic of rewards is read and filtered. If
    it begins at a time, reading begins there: rewards are written after their trajectories."""
    fields = {name: getattr(settings, name) for name in SelectionSettings.model_fields}
    fields |= {"until": None, "from_": None if isinstance(settings.from_, int) else settings.from_}
    with Dataset(settings, topic, SelectionSettings(**fields), settings.channel) as dataset:
        for item in dataset.items():
            if isinstance(item, StrayRecord) or _is_in(ranges, item.ended):
                yield item


def _is_in(ranges: Mapping[int, OffsetRange], position: Position) -> bool:
    stored = ranges[position.partition]
    return stored.first <= position.offset < stored.end


class FunctionStatistics:
    """The rewards that each version of each function gave, on each side."""

    def __init__(self) -> None:
        self._moments: dict[tuple[Side, str, str], Moments] = {}

    def add(self, side: Side, item: Trajectory | StrayRecord) -> None:
        for reward in item.end.rewards if isinstance(item, Trajectory) else ():
            if reward.step_id is None:
                key = (side, reward.name, reward.version)
                moments = self._moments.setdefault(key, Moments())
                if reward.value is not None:
                    moments.add(reward.value)

    def rewards(self) -> list[FunctionRewards]:
        return [
            FunctionRewards(*key, Distribution.of(moments))
            for key, moments in self._moments.items()
        ]
