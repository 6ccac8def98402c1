"""The list of heavy test files names files that exist, so that none drops out by a rename."""

import pytest

from tests import heavy


@pytest.mark.parametrize("place", heavy.PLACES)
def test_a_heavy_place_exists(place: str) -> None:
    assert (heavy.TESTS / place).exists()
