"""GGUF files: their headers, the config that their metadata stands for, and their tensors by our names."""
