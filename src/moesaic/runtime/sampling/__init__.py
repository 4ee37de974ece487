"""From hidden states to the next tokens: logits, penalties, and sampling noise from (seed, position)."""
