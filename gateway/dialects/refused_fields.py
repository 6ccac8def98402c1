"""Fields of OpenAI's and vLLM's APIs that would change the answer, and that the gateway does not have.

A client that sends one is told so: ignoring it would give another answer than the one it asked for.
Fields that change nothing in an answer are accepted and ignored; docs/agents.md lists them."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from gateway.dialects.sampling import SamplingBody
from gateway.errors import BadRequest
from gateway.http.openapi import HIDDEN

REFUSED: Mapping[str, str] = {
    "functions": "Send them as tools.",
    "function_call": "Send it as tool_choice.",
    "web_search_options": "Offer a search to the model as one of the tools.",
    "audio": "This gateway answers with text.",
    "chat_template": "The gateway uses the chat template of its tokenizer.",
    "documents": "Send them in chat_template_kwargs.",
    "continue_final_message": "End with a message that is not the assistant's.",
    "use_beam_search": "Every answer is one sample.",
    "thinking_token_budget": "Limit the whole answer with max_tokens.",
    "truncate_prompt_tokens": "Shorten the messages.",
    "prompt_logprobs": "/generate returns them.",
    "guided_json": "Send structured_outputs or response_format.",
    "guided_regex": "Send structured_outputs.",
    "guided_choice": "Send structured_outputs.",
    "guided_grammar": "Send structured_outputs.",
}
"""What to do instead, by field."""

Refused = Annotated[Any, msgspec.Meta(extra_json_schema={HIDDEN: True})]


class RefusingBody(SamplingBody, kw_only=True):
    """Sampling fields, and those that `refuse_fields` refuses."""

    functions: Refused = None
    function_call: Refused = None
    web_search_options: Refused = None
    audio: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    continue_final_message: Refused = None
    use_beam_search: Refused = None
    thinking_token_budget: Refused = None
    truncate_prompt_tokens: Refused = None
    prompt_logprobs: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None


def refuse_fields(body: RefusingBody) -> None:
    for name, advice in REFUSED.items():
        value = getattr(body, name)
        if value is not None and value is not False:
            raise BadRequest(f"{name} is not supported. {advice}", param=name)
