"""What every process of a run did and when, as a file that opens in Perfetto (https://ui.perfetto.dev).

Each process writes a part of its own (track); whoever started them makes one file of the parts (parts). What
is written down is decided by objects that stand in place of the plain ones, in `runtime.tracing` and
`experts.tracing`; without `--trace` there are none of them.
"""
