"""What the gateway knows of the run's weights, from the `policy` topic."""

from collections.abc import Callable

from pool.core.marks import PolicyMarks
from pool.core.versions import Version
from schemas import PolicyVersion, Record


class Policy:
    """Which versions exist, and which an engine may answer with."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.marks = PolicyMarks(run)
        self.live: Version | None = None
        """The newest that every reachable engine had; of the newest incarnation only."""
        self.on_change: Callable[[], None] = lambda: None

    def apply(self, record: Record) -> None:
        if not isinstance(record, PolicyVersion) or record.run != self.run:
            return
        if record.incarnation > self.marks.incarnation:
            self.live = None
        self.marks.add(record)
        if record.phase == "live" and record.incarnation == self.marks.incarnation:
            self.live = Version(record.incarnation, record.version)
        self.on_change()

    def allows(self, version: Version | None) -> bool:
        """An engine of an earlier incarnation, or behind the live version, has old weights."""
        if not self.marks.incarnation:
            return True  # no trainer has ever been there
        if version is None or version.incarnation != self.marks.incarnation:
            return False
        return self.live is None or version >= self.live

    def was_opened(self, version: int) -> bool:
        if self.marks.opened is None:
            return version == 0  # the weights that the engines started with
        return self.marks.is_opened(version)
