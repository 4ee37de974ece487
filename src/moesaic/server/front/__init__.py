"""The front answers HTTP for several models, each of which has a server in a process of its own."""
