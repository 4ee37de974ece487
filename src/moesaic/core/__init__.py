"""Plain records that every other package uses. It depends only on numpy and the standard library."""
