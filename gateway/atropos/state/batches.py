"""Which groups make the next batch.

A batch has exactly `batch_size` sequences. Groups are used in packs: as many of one size, of one
environment where there are minimums, as make up the largest group that waits. So sizes that do not
divide the largest wait while it is there, and a batch that would overshoot is none.

Groups of agents have any size, and one that is larger than all others would stop them. So while some
wait, and no environment has a minimum, any sizes that make exactly a batch are used.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import itemgetter

from gateway.atropos.state.queue import Group, Queue

Placed = tuple[int, Group]
"""A group and its place in the queue."""


def form(queue: Queue, batch_size: int, minimums: Mapping[int, float]) -> list[Group] | None:
    """The next batch, or None. `minimums` are the environments' shares of it, in the order in which
    they registered; without any, whose group it is does not matter."""
    if batch_size <= 0 or sum(queue.sequences.values()) < batch_size:
        return None
    if minimums:
        return _with_minimums(queue, batch_size, minimums)
    return _in_order(queue, queue.largest, batch_size)


def fill(queue: Queue, batch_size: int) -> list[Group] | None:
    """Groups of any size that make exactly a batch: the oldest, wherever the rest can be made up."""
    if batch_size <= 0 or sum(queue.sequences.values()) < batch_size:
        return None
    waiting = list(queue)
    sums = _sums(waiting, batch_size)
    wanted = batch_size
    if not sums[0] >> wanted & 1:
        return None
    batch: list[Group] = []
    for group, of_rest in zip(waiting, sums[1:], strict=True):
        if group.size <= wanted and of_rest >> wanted - group.size & 1:
            batch.append(group)
            wanted -= group.size
        if wanted == 0:
            break
    return batch


def _sums(groups: list[Group], most: int) -> list[int]:
    """For each place: bit n says that groups from there on make up n sequences."""
    bits = (2 << most) - 1
    sums = accumulate(reversed(groups), lambda s, group: (s | s << group.size) & bits, initial=1)
    return list(sums)[::-1]


def _in_order(groups: Iterable[Group], largest: int, batch_size: int) -> list[Group] | None:
    packs: dict[int, list[Group]] = {}
    batch: list[Group] = []
    filled = 0
    for group in groups:
        pack = packs.setdefault(group.size, [])
        pack.append(group)
        if len(pack) * group.size != largest:
            continue
        for member in pack:
            batch.append(member)
            filled += member.size
            if filled >= batch_size:
                return batch if filled == batch_size else None
        pack.clear()
    return None


def _with_minimums(
    queue: Queue, batch_size: int, minimums: Mapping[int, float]
) -> list[Group] | None:
    packed = _packed_by_env(queue)
    shares = {env_id: int(batch_size * share) for env_id, share in minimums.items()}
    needs = {env_id: need for env_id, need in shares.items() if need > 0}
    if needs.keys() - packed.keys():
        return None
    wanted = sum(needs.values())
    if wanted > batch_size:
        needs = {
            env_id: max(_smallest(packed[env_id]), int(need * batch_size / wanted))
            for env_id, need in needs.items()
        }
    return _fill(packed, needs, batch_size)


def _packed_by_env(groups: Iterable[Group]) -> dict[int, list[Placed]]:
    """Groups in complete packs. Nobody's groups count for nobody's minimum, and are not used."""
    waiting = list(groups)
    largest = max((group.size for group in waiting), default=0)
    packs: dict[tuple[int, int], list[Placed]] = {}
    packed: dict[int, list[Placed]] = {}
    for place, group in enumerate(waiting):
        if group.env_id is None:
            continue
        pack = packs.setdefault((group.env_id, group.size), [])
        pack.append((place, group))
        if len(pack) * group.size == largest:
            packed.setdefault(group.env_id, []).extend(pack)
            pack.clear()
    return packed


def _smallest(placed: Iterable[Placed]) -> int:
    return min(group.size for _, group in placed)


def _fill(
    packed: Mapping[int, list[Placed]], needs: Mapping[int, int], batch_size: int
) -> list[Group] | None:
    """First what each environment needs, then whatever fits, in the order of the queue."""
    batch: list[Group] = []
    used: set[int] = set()
    filled = 0
    for env_id, need in needs.items():
        own = 0
        for place, group in packed.get(env_id, ()):
            if own >= need:
                break
            if filled + group.size <= batch_size:
                batch.append(group)
                used.add(place)
                own += group.size
                filled += group.size
    rest = (placed for groups in packed.values() for placed in groups if placed[0] not in used)
    for _, group in sorted(rest, key=itemgetter(0)):
        if filled == batch_size:
            break
        if filled + group.size <= batch_size:
            batch.append(group)
            filled += group.size
    return batch if filled == batch_size else None
