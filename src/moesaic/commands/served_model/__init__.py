"""One of the models of `moesaic serve A B`, as a program of its own."""
