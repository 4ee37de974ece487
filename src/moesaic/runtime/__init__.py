"""The attention worker: its process and loop, and the executor of what its scheduler decides."""
