"""`moesaic profile`: runs prompts through the engine in this process and records their tokens' experts."""
