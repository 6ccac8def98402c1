"""The summary that `steplog train --offline` prints when it ends, computed from the ledger."""

import asyncio
from collections import Counter
from pathlib import Path

from pool.connection import Connection
from pool.core.ledger import trajectory_verdicts
from pool.readers.end_offsets import wait_until_readable
from pool.readers.reader import read_records
from pool.topics import LEDGER
from schemas import Decision, Outcome
from servicekit.drawing import format_duration
from trainer.checkpoints.folder import MODEL


class OfflineSummary:
    """Totals over all incarnations of the run."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.groups: Counter[str] = Counter()
        self.trajectories: Counter[str] = Counter()
        self.version = 0
        self.tokens = 0
        wait_until_readable(connection, LEDGER)  # the last Decision was committed only just now
        asyncio.run(self._read(connection, run))

    async def _read(self, connection: Connection, run: str) -> None:
        codec = connection.codec()
        seen: set[tuple[type, int]] = set()
        for record in await read_records(connection, LEDGER, codec):
            if not isinstance(record, Decision | Outcome) or record.run != run:
                continue
            if (key := (type(record), record.sequence)) not in seen:
                seen.add(key)
                self._add(record)

    def _add(self, record: Decision | Outcome) -> None:
        if isinstance(record, Outcome):
            self.tokens += int(record.metrics.get("tokens", 0))
            self.version = max(self.version, record.version)
        else:
            self.groups.update(group.verdict for group in record.groups)
            self.trajectories.update(trajectory_verdicts(record))

    def format(
        self, run: str, checkpoints: Path, range_progress: tuple[int, int], seconds: float
    ) -> str:
        done, total = range_progress
        if done < total:
            head = (
                f"run {run} stopped at {done / total:.0%} of its range; start it again to continue"
            )
        else:
            head = f"run {run} has read its whole range"
        lines = [
            f"{head} ({format_duration(seconds)} in this process)",
            f"  groups        {_counts(self.groups)}",
            f"  trajectories  {_counts(self.trajectories)}",
            f"  tokens        {self.tokens:,} trained",
            f"  version       {self.version}",
        ]
        if self.version:
            lines += [
                f"  checkpoint    {checkpoints / run}",
                f"  model         {checkpoints / run / MODEL} (Hugging Face)",
                f"  export it     steplog export --run {run} --checkpoints {checkpoints} --into FOLDER",
            ]
        return "\n".join(lines)


def _counts(verdicts: Counter[str]) -> str:
    ordered = sorted(verdicts.items(), key=lambda item: (item[0] != "train", -item[1], item[0]))
    return ", ".join(f"{count:,} {verdict}" for verdict, count in ordered) or "none"
