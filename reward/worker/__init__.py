"""The reward worker: a consumer of `steps` that writes `rewarded`, and its HTTP server."""
