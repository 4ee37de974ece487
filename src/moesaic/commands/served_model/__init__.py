"""The program that serves one model of `moesaic serve A B`."""
