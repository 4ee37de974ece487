"""The schedulers, a file each. All of them use the events and actions that `actions` defines."""
