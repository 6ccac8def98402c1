from collections.abc import Iterator
from pathlib import Path

import pytest

from steplog import Ending, EnvironmentFailed
from steplog.environment.running import journal as journal_
from steplog.environment.running.journal import Journal

FILE = Path("place/journal.jsonl")
END = Ending("completed", 0.5)
opened: list[Journal] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def open_journal() -> Journal:
    opened.append(Journal(FILE))
    return opened[-1]


def again(journal: Journal) -> Journal:
    """As the next process finds it."""
    journal.close()
    return open_journal()


def finish(journal: Journal, number: int) -> None:
    journal.record_draw(number, {"at": number})
    journal.record_start(number, [f"url-{number}"])
    journal.record_endings(number, {f"url-{number}": END})
    journal.record_done(number, {"after": number})


def test_drawing_goes_on_at_the_oldest_item_that_is_open() -> None:
    journal = open_journal()
    for number in (0, 2, 3):
        finish(journal, number)
    journal.record_draw(1, {"at": 1})
    journal.record_start(1, ["url-1"])
    journal = again(journal)
    assert (journal.first, journal.done, journal.count) == (1, {2, 3}, 3)
    assert journal.first_state == {"at": 1}
    assert journal.open[1].urls == ["url-1"] and journal.open[1].endings is None
    finish(journal, 1)
    assert (journal.first, journal.done, journal.count) == (4, set(), 4)


def test_a_group_that_had_ended_is_known_with_its_ends() -> None:
    journal = open_journal()
    journal.record_draw(0, {})
    journal.record_start(0, ["a", "b"])
    ends = {"a": END, "b": Ending("failed", reason="no")}
    journal.record_endings(0, ends)
    assert again(journal).open[0].endings == ends


def test_the_newest_state_holds_where_nothing_is_open() -> None:
    journal = open_journal()
    finish(journal, 0)
    journal = again(again(journal))
    assert journal.first_state == {"after": 0}


def test_half_a_line_is_no_line() -> None:
    journal = open_journal()
    finish(journal, 0)
    journal.close()
    with FILE.open("a") as file:
        file.write('{"drawn": 1, "sta')
    journal = open_journal()
    assert journal.first == 1 and not journal.open
    finish(journal, 1)
    assert again(journal).first == 2


def test_a_damaged_file_is_told_in_a_sentence() -> None:
    FILE.parent.mkdir()
    FILE.write_text("{}\nnonsense\n")
    with pytest.raises(EnvironmentFailed, match="is damaged"):
        Journal(FILE)


def test_the_file_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_, "COMPACT_AFTER", 20)
    journal = open_journal()
    journal.record_draw(0, {"at": 0})
    for number in range(1, 200):
        finish(journal, number)
    assert len(FILE.read_text().splitlines()) < 30
    journal = again(journal)
    assert journal.first == 0 and journal.count == 199 and journal.first_state == {"at": 0}


def test_a_state_that_json_cannot_hold_is_told_in_a_sentence() -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"state_dict\(\) must return values that JSON can represent"
    ):
        open_journal().record_draw(0, {"items": {1, 2}})


def test_without_a_file_it_remembers_for_its_own_life() -> None:
    journal = Journal(None)
    finish(journal, 0)
    assert journal.count == 1 and not Path("place").exists()
