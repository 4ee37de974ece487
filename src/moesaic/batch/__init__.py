"""`moesaic run-batch`: a file of OpenAI batch lines in, a file of results out, whatever happens between.

A line's way: lines (what it asks) -> run (window, retries) -> client -> the HTTP API's own code, in
this process (local) -> lines (its result) -> output (appended, whole or not at all). The output is
its own journal: the same command reads it and goes on.
"""
