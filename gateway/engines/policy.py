"""The versions of the run's weights, from the topic `policy`."""

from collections.abc import Callable

from pool.core.marks import PolicyMarks
from pool.core.versions import Version
from schemas import PolicyVersion, Record


class Policy:
    """Which versions exist, and which ones an engine may serve."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.marks = PolicyMarks(run)
        self.live: Version | None = None
        """The newest version that every reachable engine has; of the newest incarnation only."""
        self.keep_kv = False
        """Whether engines keep their KV cache over the updates of the newest incarnation."""
        self.on_change: Callable[[], None] = lambda: None

    def apply(self, record: Record) -> None:
        if not isinstance(record, PolicyVersion) or record.run != self.run:
            return
        if record.incarnation > self.marks.incarnation:
            self.live = None
        if record.phase == "started" and record.incarnation >= self.marks.incarnation:
            self.keep_kv = record.keep_kv
        self.marks.add(record)
        if record.phase == "live" and record.incarnation == self.marks.incarnation:
            self.live = Version(record.incarnation, record.version)
        self.on_change()

    def allows(self, version: Version | None) -> bool:
        """Whether an engine with this version may serve calls: not with weights of an earlier
        incarnation or older than the live version."""
        if not self.marks.incarnation:
            return True  # no trainer has started in this run yet
        if version is None or version.incarnation != self.marks.incarnation:
            return False
        return self.live is None or version >= self.live

    def was_opened(self, version: int) -> bool:
        """Whether the trainer has opened this version, so that Steps may claim it."""
        if self.marks.opened is None:
            return version == 0  # the weights that the engines started with
        return self.marks.is_opened(version)
