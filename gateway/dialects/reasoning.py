"""The effort of reasoning that a client asks for, as variables of the chat template."""

from typing import Any


def template_variables(variables: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """The template's variables, as vLLM sets them for `reasoning_effort`. Templates differ in which of
    the two they read; what the client sets in chat_template_kwargs has precedence."""
    if effort is None:
        return variables or {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (variables or {})
