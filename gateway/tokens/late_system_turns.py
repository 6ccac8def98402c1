"""System turns after the first message, for templates that accept only a leading one.

Claude Code adds a system turn behind the user's first. Some templates raise an error then (Qwen3.5),
some move it to the front (DeepSeek V3), where it would change the prefix of everything before, and
some also refuse two user turns in a row (Mistral, Gemma). A probe when the template is loaded shows
which of these holds. Such turns are then rendered in their place as turns of the user, marked by a
first line, so that each prompt still extends the one before.
"""

import logging
from collections.abc import Callable, Sequence

from gateway.dialects.request import Message
from gateway.errors import BadRequest

log = logging.getLogger(__name__)

MARK = "[system]"
"""First line of a system turn that is rendered as the user's."""
PROBE: Sequence[Message] = (
    {"role": "user", "content": "probe-1"},
    {"role": "system", "content": "probe-2"},
    {"role": "assistant", "content": "an answer"},
    {"role": "system", "content": "probe-3"},
    {"role": "user", "content": "probe-4"},
)

Adapt = Callable[[Sequence[Message]], Sequence[Message]]


def keep_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """All turns as they are."""
    return messages


def as_user_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Late system turns as turns of the user."""
    return [*messages[:1], *map(_as_user, messages[1:])]


def joined_user_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Late system turns as text of the user's turn beside them, or as a turn if there is none."""
    joined: list[Message] = []
    is_joining = False
    for at, message in enumerate(messages):
        is_late = at > 0 and message["role"] == "system"
        turn = _as_user(message) if is_late else message
        follows_user = bool(joined) and joined[-1]["role"] == turn["role"] == "user"
        if follows_user and (is_late or is_joining):
            content = f"{joined[-1]['content']}\n\n{turn['content']}"
            joined[-1] = joined[-1] | {"content": content}
        else:
            joined.append(turn)
        is_joining = is_late or (follows_user and is_joining)
    return joined


def choose_rendering(render: Callable[[Sequence[Message]], str]) -> Adapt:
    """How messages must be adapted for a template: the first way in which it renders system turns in
    their place. `render` applies the template, and raises BadRequest where the template refuses."""
    for adapt in (keep_turns, as_user_turns, joined_user_turns):
        try:
            text = render(adapt(PROBE))
        except BadRequest:
            continue
        places = [text.find(f"probe-{number}") for number in range(1, 5)]
        if -1 not in places and places == sorted(places):
            if adapt is not keep_turns:
                log.info(
                    "The chat template accepts only a leading system turn. Later ones are rendered as "
                    "user turns that begin with %s.",
                    MARK,
                )
            return adapt
    return keep_turns


def _as_user(message: Message) -> Message:
    if message["role"] != "system":
        return message
    return {"role": "user", "content": f"{MARK}\n{message['content']}"}
