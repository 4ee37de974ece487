"""One scheduler per file. All of them use the events and actions that `actions` defines.

Question: Where is a schedule (`--schedule`) written, and where is it built?
"""
