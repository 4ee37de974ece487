"""`moesaic run-batch`: answers a file of OpenAI batch lines, and continues after a crash.

The path of a line: lines (parses it) -> run (window, retries) -> client -> the HTTP API's own code in this
process (local) -> lines (its result) -> output (appended completely or not at all). The output file is its
own journal: the same command reads it and continues.
"""
