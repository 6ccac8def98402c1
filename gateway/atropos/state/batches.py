"""Chooses the groups of the next batch.

A batch has exactly `batch_size` sequences. Groups are used in packs, as Atropos does: as many groups of
one size (and of one environment, if there are minimum allocations) as make up the size of the largest
queued group. So sizes that do not divide the largest wait while it is queued, and a batch that would
overshoot is not formed.

Groups of agents have any size, and one that is larger than all others would block them. So while such
groups are queued and no environment has a minimum, any sizes that sum to exactly a batch are used.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import itemgetter

from gateway.atropos.state.queue import GroupQueue, QueuedGroup

IndexedGroup = tuple[int, QueuedGroup]
"""A group with its index in the queue."""


def form_in_packs(
    queue: GroupQueue, batch_size: int, minimums: Mapping[int, float]
) -> list[QueuedGroup] | None:
    """The next batch, or None if none can be formed. `minimums` are the environments' minimum shares,
    in the order of their registration; without any, a group's environment does not matter."""
    if batch_size <= 0 or sum(queue.sequences.values()) < batch_size:
        return None
    if minimums:
        return _with_minimums(queue, batch_size, minimums)
    return _in_order(queue, queue.largest, batch_size)


def form_of_any_size(queue: GroupQueue, batch_size: int) -> list[QueuedGroup] | None:
    """Groups of any size that sum to exactly a batch: the oldest ones with which that is possible."""
    if batch_size <= 0 or sum(queue.sequences.values()) < batch_size:
        return None
    groups = list(queue)
    sums = _sums(groups, batch_size)
    missing = batch_size
    if not sums[0] >> missing & 1:
        return None
    batch: list[QueuedGroup] = []
    for group, later_sums in zip(groups, sums[1:], strict=True):
        if group.size <= missing and later_sums >> missing - group.size & 1:
            batch.append(group)
            missing -= group.size
        if missing == 0:
            break
    return batch


def _sums(groups: list[QueuedGroup], limit: int) -> list[int]:
    """At each index, a bit set: bit n says that some of the groups from there on sum to n sequences."""
    bits = (2 << limit) - 1
    sums = accumulate(reversed(groups), lambda s, group: (s | s << group.size) & bits, initial=1)
    return list(sums)[::-1]


def _in_order(
    groups: Iterable[QueuedGroup], largest: int, batch_size: int
) -> list[QueuedGroup] | None:
    packs: dict[int, list[QueuedGroup]] = {}
    batch: list[QueuedGroup] = []
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
    queue: GroupQueue, batch_size: int, minimums: Mapping[int, float]
) -> list[QueuedGroup] | None:
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


def _packed_by_env(groups: Iterable[QueuedGroup]) -> dict[int, list[IndexedGroup]]:
    """Groups in complete packs. Those without an environment count for no minimum and are not used."""
    queued = list(groups)
    largest = max((group.size for group in queued), default=0)
    packs: dict[tuple[int, int], list[IndexedGroup]] = {}
    packed: dict[int, list[IndexedGroup]] = {}
    for index, group in enumerate(queued):
        if group.env_id is None:
            continue
        pack = packs.setdefault((group.env_id, group.size), [])
        pack.append((index, group))
        if len(pack) * group.size == largest:
            packed.setdefault(group.env_id, []).extend(pack)
            pack.clear()
    return packed


def _smallest(placed: Iterable[IndexedGroup]) -> int:
    return min(group.size for _, group in placed)


def _fill(
    packed: Mapping[int, list[IndexedGroup]], needs: Mapping[int, int], batch_size: int
) -> list[QueuedGroup] | None:
    """First what each environment's minimum needs, then whatever fits, in the order of the queue."""
    batch: list[QueuedGroup] = []
    used: set[int] = set()
    filled = 0
    for env_id, need in needs.items():
        own = 0
        for index, group in packed.get(env_id, ()):
            if own >= need:
                break
            if filled + group.size <= batch_size:
                batch.append(group)
                used.add(index)
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
