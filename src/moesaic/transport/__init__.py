"""Transports move messages between processes. They do not know what a message means."""
