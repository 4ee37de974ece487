"""The arithmetic of the models: the torch reference, native CPU kernels, and the table that picks one of
them."""
