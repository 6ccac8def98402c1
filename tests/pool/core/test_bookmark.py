from bisect import bisect_right

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pool.core.bookmark import MAX_TEXT, Bookmark, add_mark, strip_mark
from servicekit.errors import Fatal

OFFSETS = st.integers(0, 2**62)
BATCH = 500
"""Records that one poll takes at most."""


@given(st.lists(OFFSETS, min_size=1, unique=True).map(sorted), st.integers(1, 1000))
def test_any_bookmark_comes_back_from_its_text(offsets: list[int], above: int) -> None:
    bookmark = Bookmark(offsets[0], tuple(offsets))
    assert Bookmark.parse(bookmark.encode(), offsets[-1] + above) == bookmark


@given(OFFSETS)
def test_a_bookmark_without_pending_items_comes_back_from_its_text(offset: int) -> None:
    assert Bookmark.parse(Bookmark(offset).encode(), offset) == Bookmark(offset)


def test_the_text_is_a_format_the_rebuild_offset_and_varints() -> None:
    # 0, then 5, then 300 = 0b10_0101100: low seven bits first.
    assert Bookmark(1000, (1000, 1005, 1305)).encode() == "1 1000 AAWsAg=="


@pytest.mark.parametrize("text", [None, ""])
def test_empty_text_is_an_offset_that_an_operator_moved(text: str | None) -> None:
    assert Bookmark.parse(text, 70) == Bookmark(70)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "1",
        "1 5",
        "1 5 AA=X AA==",
        "2 5 ",  # a format of the future
        "1 five ",
        "1 -5 ",
        "1 5 ???",
        "1 5 A",
        "1 5 gA==",  # a number that is cut off
        "1 101 ",  # rebuilds from above the committed offset
        "1 100 AA==",  # a pending item that is not below it
        '{"rebuild": 5}',
        "\N{SNOWMAN}",
    ],
)
def test_garbage_stops_the_process_with_a_sentence(text: str) -> None:
    with pytest.raises(Fatal, match="at offset 100 has metadata that this version cannot read"):
        Bookmark.parse(text, 100)


@given(st.text() | st.from_regex(r"1 \d+ [A-Za-z0-9+/]*=?=?", fullmatch=True), OFFSETS)
@example("1 " + "9" * 5000 + " ", 0)
def test_no_text_fails_in_another_way(text: str, committed: int) -> None:
    try:
        bookmark = Bookmark.parse(text, committed)
    except Fatal:
        return
    assert 0 <= bookmark.rebuild <= committed
    assert all(bookmark.rebuild <= offset < committed for offset in bookmark.pending)


@pytest.mark.parametrize(
    ("distance", "fit"),
    [
        # 4,095 less a mark of 9, "1 ", a rebuild offset of 7 digits and " " leaves 4,076 characters
        # of base64: 1,019 times four characters for three bytes.
        (127, 3_057),  # 1 byte each
        (128, 1_528),  # 2 bytes each
        (16_384, 1_019),  # 3 bytes each
    ],
)
def test_how_many_pending_items_fit(distance: int, fit: int) -> None:
    def length(items: int) -> int:
        pending = range(1_000_000 + distance, 1_000_000 + distance * (items + 1), distance)
        return len(Bookmark(1_000_000, tuple(pending)).encode())

    assert length(fit) <= MAX_TEXT < length(fit + 1)


@pytest.mark.parametrize("distance", [1, 127, 128, 2**14, 2**21 - 1])
@pytest.mark.parametrize("rebuild", [0, 2**40])
def test_one_more_batch_fits_behind_a_bookmark_of_half_the_length(
    rebuild: int, distance: int
) -> None:
    """A partition pauses at half of the text; so far apart are items at most, in varints of three
    bytes."""

    def length(items: int) -> int:
        return len(Bookmark(rebuild, tuple(rebuild + n * distance for n in range(items))).encode())

    half = bisect_right(range(4_000), MAX_TEXT // 2, key=length)
    assert length(half - 1 + BATCH) <= MAX_TEXT


def test_a_mark_tells_equal_commits_apart_and_changes_nothing_else() -> None:
    text = Bookmark(3, (5, 9)).encode()
    assert add_mark(text) != add_mark(text)
    assert Bookmark.parse(add_mark(text), 10) == Bookmark(3, (5, 9))
    assert strip_mark(add_mark(text)) == strip_mark(text) == text
    assert len(add_mark("x" * MAX_TEXT)) == 4095
