"""Changes lines of the package one at a time and asks whether the tests notice."""
