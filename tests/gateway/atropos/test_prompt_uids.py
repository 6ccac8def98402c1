"""Names of groups: never the same, where Kafka's clients expect them, and together for a stretch."""

from gateway.atropos.log.prompt_uids import STRETCH, Neighbours
from pool.readers.reader import TopicReader

PARTITIONS = 12


def test_groups_that_come_together_lie_in_one_partition_as_every_client_computes_it() -> None:
    neighbours = Neighbours(PARTITIONS)
    uids = [neighbours.draw() for _ in range(100 * STRETCH)]
    partition_of = TopicReader("", PARTITIONS, None).partition_of
    stretches = [
        {partition_of(uid) for uid in uids[at : at + STRETCH]}
        for at in range(0, len(uids), STRETCH)
    ]
    assert all(len(partitions) == 1 for partitions in stretches)
    assert set.union(*stretches) == set(range(PARTITIONS))
    assert len(set(uids)) == len(uids)
