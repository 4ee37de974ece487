"""Which rank holds which experts, and which rank serves which requests and tokens."""
