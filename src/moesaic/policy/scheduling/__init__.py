"""Decides which rows run next: batches, KV blocks, queues, and the schedulers that combine them."""
