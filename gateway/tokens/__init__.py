"""Messages to token ids and back: chat template, tokenizer and their caches, parsers of answers."""
