"""Code that has to pass tests. The environment does not score: it registers the tests with each
trajectory, and a reward worker runs the model's code against them in its sandbox.

steplog env examples/environments/code_unit_tests.py:CodeUnitTests serve
steplog reward --function unit_tests --tokenizer MODEL_FOLDER
"""

from typing import Any, NamedTuple

from steplog import Environment, Rollout


class Exercise(NamedTuple):
    task: str
    tests: list[str]


EXERCISES = [
    Exercise(
        "add(a, b), the sum of two numbers",
        ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"],
    ),
    Exercise(
        "reverse(text), the text from its end to its start",
        ["assert reverse('abc') == 'cba'", "assert reverse('') == ''"],
    ),
    Exercise(
        "count(text, letter), how often a letter occurs",
        ["assert count('banana', 'a') == 3", "assert count('', 'a') == 0"],
    ),
    Exercise(
        "largest(numbers), the largest of a list, or None if it is empty",
        ["assert largest([1, 9, 3]) == 9", "assert largest([]) is None"],
    ),
]


class CodeUnitTests(Environment[Exercise]):
    async def setup(self) -> None:
        self.items = EXERCISES

    def metadata(self, item: Exercise) -> dict[str, Any]:
        return {"tests": item.tests}

    async def collect_trajectory(self, item: Exercise, rollout: Rollout) -> None:
        prompt = f"Write a Python function {item.task}. Answer with one ```python block."
        await rollout.client.chat.completions.create(
            model=rollout.model, messages=[{"role": "user", "content": prompt}], max_tokens=300
        )
