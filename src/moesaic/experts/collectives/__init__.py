"""Collectives that move rows among the ranks of a group. Every payload byte is counted."""
