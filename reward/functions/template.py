"""Texts with places for what a trajectory says.

`{prompt}` is what the model was first asked, `{response}` its last response, `{transcript}` the last
prompt and response together, `{metadata[key]}` a value. All are put in at once, so braces in a text
that is put in mean nothing; other braces in the template stay as they are.
"""

import re
from collections.abc import Mapping

import msgspec

from reward.api import RewardFailed, Trajectory

PLACE = re.compile(r"\{(prompt|response|transcript|metadata\[([^\]{}]+)\])\}")


def fill(template: str, trajectory: Trajectory) -> str:
    def put(match: re.Match[str]) -> str:
        if match[2] is not None:
            return _value(trajectory.metadata, match[2])
        if match[1] == "response":
            return trajectory.text
        if match[1] == "transcript":
            return "".join(step.prompt_text + step.text for step in trajectory.steps[-1:])
        return trajectory.steps[0].prompt_text if trajectory.steps else ""

    return PLACE.sub(put, template)


def _value(metadata: Mapping[str, object], key: str) -> str:
    if key not in metadata:
        raise RewardFailed(f"the template needs metadata[{key!r}], which is not there")
    value = metadata[key]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
