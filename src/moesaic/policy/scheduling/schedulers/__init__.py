"""One scheduler per file. All of them use the events and actions that `actions` defines."""
