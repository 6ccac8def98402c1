"""The routes of the HTTP API, by who uses them: LLM clients, environments, white-box agents,
operators."""
