"""`moesaic run-batch`: answers a file of OpenAI batch lines, and continues after a crash.

The path of a line:

    lines       parses it
    run         finds the lines without a result
    window      keeps a number of requests in flight, and retries
    local       runs the HTTP API in this process, which the client calls without a socket
    lines       makes the result
    output      appends the result completely or not at all

The output file is its own journal: the same command reads it and continues.
"""
