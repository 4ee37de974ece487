"""The processes of a cluster: a supervisor that restarts them, a router for requests, scaling and joining."""
