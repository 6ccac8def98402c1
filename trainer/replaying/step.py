"""`steplog replay step`: how a version was made, shown and done again."""

from collections.abc import Callable

import msgspec

from servicekit.command_line import print_line
from trainer.replaying.past import Past
from trainer.replaying.settings import ReplayStepSettings
from trainer.replaying.showing import document, lines


def step(settings: ReplayStepSettings, say: Callable[[str], None] = print_line) -> int:
    """Returns the exit status: 1 when the repeated step differs from the recorded one."""
    past = Past(settings, settings.run)
    (decision,) = past.making(settings.version)
    rebuilt = past.rebuild(decision)
    again = None
    if settings.trains:
        from trainer.replaying.again import train_again  # the batch alone needs no torch

        again = train_again(settings, past, rebuilt)
    if settings.json_:
        say(msgspec.json.encode(document(rebuilt, again)).decode())
    else:
        for line in lines(rebuilt, again):
            say(line)
    is_same = rebuilt.same is not False and (again is None or again.same)
    return 0 if is_same else 1
