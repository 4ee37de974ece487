"""Offloading for a model larger than its fast memory: schedules as task lists, their prices, and the policy
search."""
