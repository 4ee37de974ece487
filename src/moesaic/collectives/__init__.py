"""Moving token sets among the ranks of a group, every payload byte counted."""
