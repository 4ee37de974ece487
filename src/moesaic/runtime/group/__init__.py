"""An attention worker that is a group of processes. Its ranks share the attention heads and the experts."""
