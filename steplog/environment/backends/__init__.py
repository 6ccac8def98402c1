"""Where rollouts find their model: a gateway, or any OpenAI-style server."""
