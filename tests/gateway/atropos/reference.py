"""Atropos' rules for batches and buffers, as plainly as they can be written: every step scans all."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from gateway.atropos.state.queue import QueuedGroup


def batch(queue: Sequence[QueuedGroup], size: int) -> list[int] | None:
    if sum(g.size for g in queue) < size:
        return None
    return _exactly([g for _, g in _packed(queue, lambda g: g.size)], size)


def batch_with_minimums(
    queue: Sequence[QueuedGroup], size: int, minimums: Mapping[int, float]
) -> list[int] | None:
    owned = _packed(queue, lambda g: (g.env_id, g.size))
    packed = [(at, g) for at, g in owned if g.env_id is not None]
    needs = {env: int(size * share) for env, share in minimums.items() if int(size * share) > 0}
    for env in needs:
        if not any(g.env_id == env for _, g in packed):
            return None
    total = sum(needs.values())
    if total > size:
        for env, need in needs.items():
            smallest = min(g.size for _, g in packed if g.env_id == env)
            needs[env] = max(smallest, int(need * size / total))
    chosen: list[QueuedGroup] = []
    for env, need in needs.items():
        for _, g in packed:
            own = sum(c.size for c in chosen if c.env_id == env)
            if g.env_id == env and own < need and sum(c.size for c in chosen) + g.size <= size:
                chosen.append(g)
    for _, g in sorted(packed, key=lambda placed: placed[0]):
        if g not in chosen and sum(c.size for c in chosen) + g.size <= size:
            chosen.append(g)
    return [g.sequence for g in chosen] if sum(g.size for g in chosen) == size else None


def leaving(sizes: Sequence[int], target: int) -> list[int]:
    """Places of the groups that leave a buffer."""
    greedy: list[int] = []
    for at, size in enumerate(sizes):
        if sum(sizes[i] for i in greedy) + size <= target:
            greedy.append(at)
        if sum(sizes[i] for i in greedy) == target:
            return greedy
    places = range(len(sizes))
    sets = [set(c) for n in places for c in combinations(places, n + 1)]
    exact = [found for found in sets if sum(sizes[i] for i in found) == target]
    # The set that holds the latest group where two differ.
    return sorted(max(exact, key=lambda s: [i in s for i in reversed(places)])) if exact else []


def _packed(
    queue: Sequence[QueuedGroup], kind: Callable[[QueuedGroup], object]
) -> list[tuple[int, QueuedGroup]]:
    largest = max((g.size for g in queue), default=0)
    buckets: dict[object, list[tuple[int, QueuedGroup]]] = {}
    packed = []
    for at, g in enumerate(queue):
        bucket = buckets.setdefault(kind(g), [])
        bucket.append((at, g))
        if len(bucket) * g.size == largest:
            packed += bucket
            buckets[kind(g)] = []
    return packed


def _exactly(groups: Sequence[QueuedGroup], size: int) -> list[int] | None:
    chosen: list[QueuedGroup] = []
    for g in groups:
        chosen.append(g)
        if sum(c.size for c in chosen) >= size:
            break
    return [g.sequence for g in chosen] if sum(g.size for g in chosen) == size else None
