"""The client of a second model, which judges answers. Its calls belong to no trajectory."""

from openai import AsyncOpenAI

from steplog.environment.backends.connections import RETRIES
from steplog.environment.errors import EnvironmentFailed
from steplog.environment.settings import EnvironmentSettings


def judge_client(settings: EnvironmentSettings) -> AsyncOpenAI:
    if settings.judge_url is None:
        raise EnvironmentFailed(
            "self.judge needs --judge-url, an OpenAI-style URL such as http://HOST:PORT/v1."
        )
    key = settings.judge_api_key
    return AsyncOpenAI(
        base_url=settings.judge_url,
        api_key=key.get_secret_value() if key else "none",
        max_retries=RETRIES,
        timeout=settings.rollout_timeout_s,
    )
