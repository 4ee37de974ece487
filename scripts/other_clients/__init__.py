"""Other people's clients against a real server. See __main__."""
