"""Arithmetic with a calculator: a model that uses it is always right, one that guesses rarely is.

steplog env examples/environments/arithmetic_tool.py:ArithmeticTool serve --group-size 8
"""

import ast
import json
import operator
from typing import Any, NamedTuple

from steplog import Environment, Rollout

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression with +, - and *",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
TURNS = 4


class Problem(NamedTuple):
    expression: str
    answer: int


class ArithmeticTool(Environment[Problem]):
    async def get_next_item(self) -> Problem:
        a, b, c = (self.random.randrange(10, 1000) for _ in range(3))
        return Problem(f"{a} * {b} + {c}", a * b + c)

    async def eval_items(self) -> list[Problem]:
        return [Problem(f"{n} * {n + 1} + 7", n * (n + 1) + 7) for n in range(100, 164)]

    def metadata(self, item: Problem) -> dict[str, Any]:
        return {"answer": item.answer}

    async def collect_trajectory(self, item: Problem, rollout: Rollout) -> float:
        messages: list[Any] = [{"role": "user", "content": f"What is {item.expression}?"}]
        for _ in range(TURNS):
            answer = await rollout.client.chat.completions.create(
                model=rollout.model, messages=messages, tools=[CALCULATE], max_tokens=200
            )
            message: Any = answer.choices[0].message
            if not message.tool_calls:
                rollout.metrics["used_tool"] = float(len(messages) > 1)
                return float(str(item.answer) in (message.content or ""))
            messages.append(message.model_dump(exclude_none=True))
            messages += [_result(call) for call in message.tool_calls]
        return 0.0


def _result(call: Any) -> dict[str, Any]:
    """The tool's message: the result, or what is wrong with the model's expression."""
    try:
        tree = ast.parse(json.loads(call.function.arguments)["expression"], mode="eval")
        content = str(_value(tree.body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
        content = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return int(OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("only integers, +, - and * are allowed")
