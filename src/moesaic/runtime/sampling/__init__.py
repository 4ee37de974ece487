"""Samples the next tokens: penalties, top-k and top-p, and noise from (seed, position)."""
