from pool.bookmark import Bookmark
from pool.groups import Group, GroupAssembler
from pool.progress import Progress, Work
from pool.ready import ReadyGroups


def assignment() -> Progress[Group]:
    return Progress(0, GroupAssembler(), 0, Bookmark(0))  # type: ignore[arg-type]


def works(count: int, of: Progress[Group] | None = None) -> list[Work[Group]]:
    owner = of or assignment()
    return [Work(Group(f"p{n}", 0, 2), n, owner) for n in range(count)]


def test_groups_leave_in_the_order_in_which_they_closed() -> None:
    ready, given = ReadyGroups(10), works(3)
    for work in given:
        assert ready.put(work) is None
    assert ready.take(2) == given[:2]
    assert ready.take(2) == given[2:]
    assert ready.take(2) == []


def test_when_it_is_full_the_oldest_group_leaves_and_is_given_back() -> None:
    ready, given = ReadyGroups(2), works(4)
    assert [ready.put(work) for work in given] == [None, None, given[0], given[1]]
    assert len(ready) == 2
    assert ready.take(9) == given[2:]


def test_groups_of_lost_assignments_are_forgotten() -> None:
    ready, lost, kept = ReadyGroups(10), assignment(), assignment()
    for gone, stays in zip(works(2, lost), works(2, kept), strict=True):
        ready.put(gone)
        ready.put(stays)
    ready.keep(lambda work: work.assignment is kept)
    assert [work.assignment is kept for work in ready.take(9)] == [True, True]
