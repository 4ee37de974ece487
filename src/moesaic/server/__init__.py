"""The OpenAI-compatible HTTP API in front of one engine.

A request's way: guard (key, size, id) -> app (routes) -> requests (what may be asked) -> prompts and
sampling (what the engine is told) -> async_engine (streams of outputs) -> completions or chat (what
is answered) -> events (how it is sent). `run` owns the process: socket, signals, draining.
"""
