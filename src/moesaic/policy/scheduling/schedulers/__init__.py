"""One scheduler per file. All of them use the events and actions that `actions` defines.

Question: How is a schedule (`--schedule`) added, and where is it built?
"""
