"""A single-turn environment in the manner of Atropos' own `gsm8k_server`: `letters_env.py serve`.

A group is one chat completion with n samples on a managed server, whose ids and logprobs are posted.
It has the options of every Atropos environment.
"""

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

QUESTIONS = ("say a word", "say your name", "tell me more", "go on")
LETTERS = frozenset(range(ord("a"), ord("z") + 1))
"""The ids of the tiny model are bytes."""
TOKENS = 16


class LettersEnv(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls) -> Any:
        config = BaseEnvConfig(
            group_size=4,
            use_wandb=False,
            wandb_name="letters",
            max_token_length=64,
            max_num_workers=4,
            steps_per_eval=-1,
            total_steps=-1,
        )
        server = APIServerConfig(api_key="x", model_name="tiny", server_type="vllm")
        return config, [server]

    async def setup(self) -> None:
        self.asked = 0

    async def get_next_item(self) -> str:
        self.asked += 1
        return QUESTIONS[self.asked % len(QUESTIONS)]

    async def collect_trajectories(self, item: str) -> Any:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=TOKENS,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [score(node.masked_tokens) for node in nodes],
        }
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        pass


def score(masked_tokens: list[int]) -> float:
    """The share of small letters among the sampled tokens."""
    sampled = [number for number in masked_tokens if number != -100]
    return sum(number in LETTERS for number in sampled) / max(1, len(sampled))


if __name__ == "__main__":
    LettersEnv.cli()
