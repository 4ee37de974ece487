"""The tensors behind policy/kvblocks."""
