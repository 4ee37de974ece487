"""Load and its measurement: arrivals and lengths -> load -> measure -> report.

`serve` loads any OpenAI-compatible server, `throughput` the `LLM` class in this process.
"""
