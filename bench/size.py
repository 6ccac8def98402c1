"""Bytes of a long conversation: delta-coded prompts against what they must carry at least."""

from bench.steps import logprobs, tokens
from pool.core.prompts import encode_prompt
from schemas import Codec, Step

TURNS = 50
NEW_PROMPT = 1_400
RESPONSE = 600


def run() -> None:
    codec, contexts = Codec(), dict[str, bytes]()
    context, stored, carried, full = b"", 0, 0, 0
    for turn in range(TURNS):
        prompt = context + tokens(NEW_PROMPT)
        part = encode_prompt(prompt, contexts)
        step = Step(
            step_id=f"step-{turn}",
            trajectory_uid="trajectory",
            prompt_uid="prompt",
            step_index=turn,
            run="bench",
            response_ids=tokens(RESPONSE),
            response_logprobs=logprobs(RESPONSE),
            **part._asdict(),
        )
        context = contexts[step.step_id] = prompt + step.response_ids
        stored += len(codec.encode(step))
        carried += 4 * (NEW_PROMPT + 2 * RESPONSE)
        full += len(prompt) + 8 * RESPONSE
    print(f"\nA {TURNS}-turn trajectory that adds {NEW_PROMPT + RESPONSE:,} tokens a turn")
    print(f"  new tokens and logprobs {carried:>12,} bytes")
    print(f"  as stored               {stored:>12,} bytes  {stored / carried:.3f} times")
    print(f"  with full prompts       {full:>12,} bytes  {full / carried:.1f} times")
    print("  wanted: at most 1.2 times")
