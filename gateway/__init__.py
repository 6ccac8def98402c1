"""The HTTP gateway: agents' LLM calls go to engines, and each call becomes a Step in the log."""
