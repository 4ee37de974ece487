"""Which processes serve: which replica of an expert is asked, and how many servers there should be."""
