"""Processes that join a running cluster over TCP, from this or another host."""
