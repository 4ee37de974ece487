"""KV blocks of prefixes on a disk, so that a prompt is computed once, also over restarts."""
