"""One scheduler per file. All of them use the same events and actions, which `actions` defines."""
