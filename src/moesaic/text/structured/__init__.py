"""Structured output: which tokens a request may generate next, by llguidance's grammars."""
