"""Which tests xdist gives to the same worker: those of a file, and those of files in one group.

The files of a group share a fixture that is slow to start, or must not run at the same time. (xdist's
`--dist loadgroup` cannot do it with pytest 9.2: it writes the group into `_nodeid`, which is gone.)
"""

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

GROUPS = {
    "tests/gateway/real_engine/": "vLLM",
    "tests/steplog/environment/test_real_engine.py": "vLLM",
    "tests/gateway/atropos/test_training.py": "vLLM",
    "tests/trainer/weights/test_vllm": "vLLM",
    "tests/telemetry/test_logs.py": "telemetry",
    "tests/telemetry/test_traces.py": "telemetry",
}
"""By file, or by the beginning of a path. Two vLLMs at once would take each other's CPU."""


def group_of(file: str) -> str:
    return next((group for path, group in GROUPS.items() if file.startswith(path)), file)


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid))
