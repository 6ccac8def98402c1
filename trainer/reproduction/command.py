"""`steplog replay step`: shows how a version was made, and trains it again."""

from collections.abc import Callable

import msgspec

from trainer.reproduction.output import format_lines, make_document
from trainer.reproduction.recorded_run import RecordedRun
from trainer.reproduction.settings import ReplayStepSettings


def replay_step(settings: ReplayStepSettings, write: Callable[[str], None]) -> bool:
    """Writes the report; returns False if the batch or the training could not be reproduced."""
    run = RecordedRun(settings, settings.run)
    (decision,) = run.decisions_for(settings.version)
    batch = run.rebuild_batch(decision)
    retrained = None
    if settings.trains:
        from trainer.reproduction.retraining import retrain  # showing the batch needs no torch

        retrained = retrain(settings, run, batch)
    if settings.json_:
        write(msgspec.json.encode(make_document(batch, retrained)).decode())
    else:
        for line in format_lines(batch, retrained):
            write(line)
    return batch.is_same is not False and (retrained is None or retrained.is_same)
