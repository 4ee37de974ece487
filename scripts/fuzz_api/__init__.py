"""Requests of every kind, right and wrong, against a real server: none may be answered with a 5xx."""
