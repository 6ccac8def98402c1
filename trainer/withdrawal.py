"""Which groups of decided batches a restart leaves out, and why it may.

A Decision is never changed. A later one withdraws its groups, with the verdict `lost` or `given_up`;
from then on every restart makes the version without them.
"""

import asyncio
import logging
from collections.abc import Sequence

from pool.core.ledger import Ledger, group_id
from pool.readers.decision_batch import find_lost_groups
from schemas import Decision
from servicekit.errors import Fatal, OffsetLost
from trainer.decisions.decider import Decider
from trainer.settings import TrainSettings

log = logging.getLogger(__name__)

MAX_NAMED = 5
"""Lost groups that an error message names."""


def give_up_batch(version: int, restored: int, ledger: Ledger, decider: Decider) -> None:
    """Withdraws the batch of a version that has not been made yet; `restored` is the version of the
    checkpoint. Does nothing if the batch is given up already, so the option may stay set."""
    decisions = ledger.trained_after(version - 1)
    decision = next((d for d in decisions if d.version == version), None)
    if decision is None:
        raise Fatal(
            f"version {version} cannot be given up: run {ledger.run} has no Decision that makes it"
        )
    withdrawn = ledger.withdrawn_groups()
    groups = [g for g in decision.groups if g.verdict == "train" and group_id(g) not in withdrawn]
    if not groups:
        log.info("the batch of version %d is given up already", version)
        return
    if version <= restored or ledger.outcome(decision.sequence) is not None:
        raise Fatal(
            f"version {version} cannot be given up: it is made already, and later ones follow from it; "
            f"to continue from an older checkpoint, start another run from its export"
        )
    log.warning(
        "giving up the %d groups of version %d, which get no training", len(groups), version
    )
    decider.withdraw(groups, "given_up", "an operator gave up its batch")


def check_not_deleted(
    settings: TrainSettings,
    topic: str,
    decisions: Sequence[Decision],
    ledger: Ledger,
    decider: Decider,
) -> None:
    """Refuses to continue if Kafka has deleted groups of these Decisions, unless accept_loss is set."""
    withdrawn = ledger.withdrawn_groups()
    groups = [g for d in decisions for g in d.groups if g.verdict == "train"]
    needed = [g for g in groups if group_id(g) not in withdrawn]
    deleted = asyncio.run(find_lost_groups(settings, topic, needed)) if needed else []
    if not deleted:
        return
    if not settings.accept_loss:
        names = [f"{g.prompt_uid} in partition {g.partition}" for g in deleted[:MAX_NAMED]]
        more = ", …" if len(deleted) > MAX_NAMED else ""
        raise OffsetLost(
            f"Kafka has deleted {len(deleted)} decided groups that are in no checkpoint "
            f"({', '.join(names)}{more}); set --accept-loss to continue without them"
        )
    log.warning("continuing without %d decided groups that Kafka has deleted", len(deleted))
    decider.withdraw(deleted, "lost", "Kafka has deleted its records")
