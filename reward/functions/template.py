"""Fills templates with the texts of a trajectory.

`{prompt}` is the first prompt, `{response}` the last response, `{transcript}` the last prompt and
response together, `{metadata[key]}` a value. All are replaced in one pass, so braces in an inserted
text mean nothing; other braces in the template stay as they are.
"""

import re
from collections.abc import Mapping

import msgspec

from steplog.rewards import RewardFailed, Trajectory

PLACEHOLDER = re.compile(r"\{(prompt|response|transcript|metadata\[([^\]{}]+)\])\}")


def fill(template: str, trajectory: Trajectory) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[2] is not None:
            return _metadata_text(trajectory.metadata, match[2])
        if match[1] == "response":
            return trajectory.text
        if match[1] == "transcript":
            return "".join(step.prompt_text + step.text for step in trajectory.steps[-1:])
        return trajectory.steps[0].prompt_text if trajectory.steps else ""

    return PLACEHOLDER.sub(replace, template)


def _metadata_text(metadata: Mapping[str, object], key: str) -> str:
    if key not in metadata:
        raise RewardFailed(f"the template needs metadata[{key!r}], which the trajectory lacks")
    value = metadata[key]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
