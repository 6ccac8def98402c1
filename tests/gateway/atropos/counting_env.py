"""An environment of Atropos' own kind, as an author would write it: `python counting_env.py serve`.

Its groups are counted, so that a test sees which of them arrived.
"""

import asyncio
import os
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

GROUP_SIZE = 4


class CountingEnv(BaseEnv):
    name = "counting"

    @classmethod
    def config_init(cls) -> Any:
        config = BaseEnvConfig(
            tokenizer_name=os.environ["COUNTING_TOKENIZER"],
            group_size=GROUP_SIZE,
            use_wandb=False,
            wandb_name="counting",
            total_steps=int(os.environ["COUNTING_STEPS"]),
            rollout_server_url=os.environ["COUNTING_URL"],
            max_token_length=64,
            max_num_workers=4,
            max_batches_offpolicy=3,
            steps_per_eval=-1,
        )
        server = APIServerConfig(
            base_url="http://127.0.0.1:9/v1", api_key="x", model_name="none", health_check=False
        )
        return config, [server]

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> int:
        self.count += 1
        return self.count

    async def collect_trajectories(self, item: int) -> Any:
        await asyncio.sleep(0.02)
        tokens = [[item, member, 7] for member in range(GROUP_SIZE)]
        said = [[{"role": "assistant", "content": f"{item}", "reward": 1.0}] for _ in tokens]
        group = {
            "tokens": tokens,
            "masks": [[-100, *row[1:]] for row in tokens],
            "scores": [float(member) for member in range(GROUP_SIZE)],
            "inference_logprobs": [[1.0, -0.5, -0.25] for _ in tokens],
            "messages": said,
            "group_overrides": {},
            "overrides": [],
        }
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        pass


if __name__ == "__main__":
    CountingEnv.cli()
