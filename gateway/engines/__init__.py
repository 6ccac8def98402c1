"""vLLM servers: requests to them, their health and weights, and routing of calls."""
