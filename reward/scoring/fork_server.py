"""Preloaded by multiprocessing's fork server, which starts the scoring processes; never import it.

The fork server pays the imports once, and each scoring process is a fork of it that starts at once. It
is an interpreter of its own, started by exec: it has none of the worker's threads, sockets or Kafka
clients. It is tied to the worker and each scoring process is tied to it, so all of them end together.
"""

import reward.scoring.process_main  # noqa: F401  so that its forks have it
from reward.scoring.parent_death import die_with_parent

die_with_parent()
