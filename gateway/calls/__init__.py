"""One LLM call after its body was parsed: generation, its Step in the log, delivery of its answer."""
