"""One attention worker as a group of processes. Its ranks share the attention heads and the experts."""
