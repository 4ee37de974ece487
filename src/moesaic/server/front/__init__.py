"""One HTTP server in front of several models, each of which is a server in a process of its own."""
