"""`steplog replay step`: shows how a version was made, and trains it again."""

from collections.abc import Callable

import msgspec

from servicekit.command_line import print_line
from trainer.reproduction.output import format_lines, make_document
from trainer.reproduction.recorded_run import RecordedRun
from trainer.reproduction.settings import ReplayStepSettings


def replay_step(settings: ReplayStepSettings, write: Callable[[str], None] = print_line) -> int:
    """Writes the report. Returns the exit status: 1 if the batch or the training was not reproduced."""
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
    is_reproduced = batch.is_same is not False and (retrained is None or retrained.is_same)
    return 0 if is_reproduced else 1
