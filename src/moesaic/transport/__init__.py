"""Transports that move messages, calls and rounds between processes. They do not interpret the contents."""
