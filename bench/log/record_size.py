"""Size of a long conversation with delta-coded prompts, compared with its new tokens and logprobs."""

from bench.log.steps import logprobs, tokens
from pool.core.prompts import encode_prompt
from schemas import Codec, Step

TURNS = 50
NEW_PROMPT = 1_400
RESPONSE = 600


def run() -> None:
    codec, contexts = Codec(), dict[str, bytes]()
    context, stored, new, full = b"", 0, 0, 0
    for turn in range(TURNS):
        prompt = context + tokens(NEW_PROMPT)
        encoded = encode_prompt(prompt, contexts)
        step = Step(
            step_id=f"step-{turn}",
            trajectory_uid="trajectory",
            prompt_uid="prompt",
            step_index=turn,
            run="bench",
            response_ids=tokens(RESPONSE),
            response_logprobs=logprobs(RESPONSE),
            **encoded._asdict(),
        )
        context = contexts[step.step_id] = prompt + step.response_ids
        stored += len(codec.encode(step))
        new += 4 * (NEW_PROMPT + 2 * RESPONSE)
        full += len(prompt) + 8 * RESPONSE
    print(f"\nA {TURNS}-turn trajectory that adds {NEW_PROMPT + RESPONSE:,} tokens a turn")
    print(f"  new tokens and logprobs {new:>12,} bytes")
    print(f"  as stored               {stored:>12,} bytes  {stored / new:.3f} times")
    print(f"  with full prompts       {full:>12,} bytes  {full / new:.1f} times")
    print("  target: at most 1.2 times")
