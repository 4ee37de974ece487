"""The HTTP API, against a real engine whose worker is a thread that plays a script."""
