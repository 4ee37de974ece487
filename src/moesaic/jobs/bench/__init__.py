"""Load tests and their measurement: make requests, send them, measure the answers, report.

`serve` loads any OpenAI-compatible server. `throughput` runs the `LLM` class in this process.
"""
