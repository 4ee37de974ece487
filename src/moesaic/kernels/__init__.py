"""The arithmetic of the models: a torch reference, native CPU kernels, and a table that selects them."""
