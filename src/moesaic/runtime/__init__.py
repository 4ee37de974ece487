"""The attention worker: carries out what its scheduler decides."""
