"""The vLLM servers: what they are asked, how they are, and which takes the next call."""
