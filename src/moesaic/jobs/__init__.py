"""Work that a command does and ends: batches, benchmarks, profiles, quantised checkpoints, comparisons."""
