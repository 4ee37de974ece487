"""`moesaic profile`: runs prompts through the engine in this process and records the experts of their
tokens."""
