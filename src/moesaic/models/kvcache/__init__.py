"""The tensors of the KV cache, whose blocks policy/scheduling/kvblocks.py manages."""
