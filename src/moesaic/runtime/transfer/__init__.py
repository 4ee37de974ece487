"""Moves the KV of prompts from prefill workers to the workers that go on with the requests."""
