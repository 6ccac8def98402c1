"""`steplog replay diff`: what would change if another set of rewards were trained on."""

from collections.abc import Callable, Iterator, Mapping

import msgspec
from rich.console import Console

from pool import topics
from pool.core.groups import GroupRules
from pool.core.trajectories import StrayRecord, Trajectory, source_position
from pool.readers.dataset import Dataset
from pool.readers.scan import OffsetRange
from pool.readers.selection import SelectionSettings, find_ranges
from pool.topics import STEPS, rewarded_topic
from replay.diff.comparison import Comparer, Comparison, Distribution, FunctionRewards, Moments
from replay.diff.paired_rewards import Side, SideBySide
from replay.diff.table import DiffTable
from replay.settings import DiffSettings
from servicekit.command_line import print_line


def diff(settings: DiffSettings, say: Callable[[str], None] = print_line) -> None:
    found = compare(settings)
    if settings.json_:
        say(msgspec.json.encode(found).decode())
    else:
        Console(highlight=False).print(DiffTable(found))


def compare(settings: DiffSettings) -> Comparison:
    sides: dict[Side, str] = {
        "old": rewarded_topic(settings.rewards),
        "new": rewarded_topic(settings.with_),
    }
    there = topics.check(settings)
    for topic in sides.values():
        topics.check_rewarded_topic(there, settings, topic)
    spans = find_ranges(settings, STEPS, settings).spans
    table, functions = SideBySide(), Functions()
    for side, topic in sides.items():
        for item in _items(settings, topic, spans):
            table.add(side, item)
            functions.add(side, item)
    rules = GroupRules(
        channel=settings.channel, group_size=settings.group_size, quorum=settings.quorum
    )
    comparer = Comparer(rules, settings.limit)
    for pairs in table.prompts():
        comparer.add(pairs)
    old, new = (settings.topic_name(topic) for topic in sides.values())
    return comparer.comparison(old, new, functions.found())


def _items(
    settings: DiffSettings, topic: str, spans: Mapping[int, OffsetRange]
) -> Iterator[Trajectory | StrayRecord]:
    """Offsets are those of `steps`, so all of a topic is read, unless a time says where to begin:
    rewards are written after what they are of."""
    given = {name: getattr(settings, name) for name in SelectionSettings.model_fields}
    given |= {"until": None, "from_": None if isinstance(settings.from_, int) else settings.from_}
    with Dataset(settings, topic, SelectionSettings(**given), settings.channel) as dataset:
        for item in dataset.items():
            at = item.ended if isinstance(item, Trajectory) else source_position(item.received)
            if (
                isinstance(item, StrayRecord)
                or spans[at.partition].first <= at.offset < spans[at.partition].end
            ):
                yield item


class Functions:
    """What each version of each function gave."""

    def __init__(self) -> None:
        self._moments: dict[tuple[Side, str, str], Moments] = {}

    def add(self, side: Side, item: Trajectory | StrayRecord) -> None:
        for reward in item.end.rewards if isinstance(item, Trajectory) else ():
            if reward.step_id is None:
                key = (side, reward.name, reward.version)
                moments = self._moments.setdefault(key, Moments())
                if reward.value is not None:
                    moments.add(reward.value)

    def found(self) -> list[FunctionRewards]:
        return [
            FunctionRewards(*key, Distribution.of(moments))
            for key, moments in self._moments.items()
        ]
