"""Traces: what every process of a run did and when, in a file for Perfetto (https://ui.perfetto.dev).

Each process writes its own part (track). The process that started them joins the parts (parts). Observers
in `runtime.tracing` and `experts.observer` decide what is written. Without `--trace` there are none.
"""
