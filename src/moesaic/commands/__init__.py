"""The commands. Each is a module of its own, which is imported only when the command runs."""
