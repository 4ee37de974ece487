"""Finds how to serve a model on a cluster: simulates the best few deployments, and says what helps."""
