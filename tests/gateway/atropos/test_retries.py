"""Which posts are retries, without a server."""

from gateway.atropos.log.retries import RetryDetector


async def test_a_retry_that_is_answered_leaves_nothing_behind() -> None:
    retries = RetryDetector()
    (lost,) = await retries.match([b"f"], lambda: True)
    retries.assign_sequences([lost], 7)
    retries.settle([lost], sent=False)
    (again,) = await retries.match([b"f"], lambda: False)
    assert again.sequence == 7
    retries.settle([again], sent=True)
    assert retries.settled_up_to(9) == 9
    assert not any(kept for kept in vars(retries).values() if isinstance(kept, dict))
