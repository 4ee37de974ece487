"""The processes of a cluster: a supervisor that restarts them, request routing, scaling, and joining."""
