"""The page of the API at /docs: the OpenAPI document as plain HTML.

It loads nothing from elsewhere, so it also works where browsers cannot reach the internet."""

from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.93em ui-monospace, monospace; }
summary { padding: 0.4rem 0; cursor: pointer; }
details { border-top: 1px solid #8884; }
details > div { padding: 0 0 1rem 1.2rem; }
td, th { text-align: left; vertical-align: top; padding: 0.1rem 1.2rem 0.1rem 0; }
.method { display: inline-block; width: 3.2rem; font-weight: 600; }
.summary { color: #777; margin-left: 0.8rem; }
"""


def render_page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document whose schemas are inlined."""
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(info['description'])} An agent's base URL is "
        "<code>/{trajectory_uid}/{prompt_uid}/v1</code>. "
        '<a href="openapi.json">openapi.json</a> is the same for programs.</p>'
        f"{''.join(operations)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    errors = [
        (f"<code>{status}</code>", escape(response["description"]))
        for status, response in operation["responses"].items()
        if status != "200"
    ]
    return (
        f'<details><summary><code class="method">{method.upper()}</code>'
        f'<code>{escape(path)}</code><span class="summary">{escape(operation["summary"])}</span>'
        f"</summary><div>{_body(operation)}{_table('Errors', errors)}</div></details>"
    )


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    required = schema.get("required", ())
    fields = [
        (
            f"<code>{escape(name)}</code>",
            escape(_type(field)) + (", required" if name in required else ""),
        )
        for name, field in schema.get("properties", {}).items()
    ]
    return _table("Body", fields)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in rows)
    return f"<table><tr><th>{title}</th></tr>{lines}</table>"


def _type(schema: dict[str, Any]) -> str:
    """The kind of value, in words. Null is left out: every optional field accepts it."""
    if "anyOf" in schema:
        kinds = [_type(option) for option in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
