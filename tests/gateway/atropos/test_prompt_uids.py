"""Names of groups: never the same, where Kafka's clients expect them, and together for a stretch."""

from gateway.atropos.log.prompt_uids import GROUPS_IN_A_ROW, PromptUids
from pool.readers.reader import TopicReader

PARTITIONS = 12


def test_groups_that_come_together_lie_in_one_partition_as_every_client_computes_it() -> None:
    prompt_uids = PromptUids(PARTITIONS)
    uids = [prompt_uids.next_uid() for _ in range(100 * GROUPS_IN_A_ROW)]
    partition_of = TopicReader("", PARTITIONS, None).partition_of
    stretches = [
        {partition_of(uid) for uid in uids[at : at + GROUPS_IN_A_ROW]}
        for at in range(0, len(uids), GROUPS_IN_A_ROW)
    ]
    assert all(len(partitions) == 1 for partitions in stretches)
    assert set.union(*stretches) == set(range(PARTITIONS))
    assert len(set(uids)) == len(uids)
