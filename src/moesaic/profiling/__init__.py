"""`moesaic profile`: prompts through the engine in this process, and what their tokens chose as a file."""
