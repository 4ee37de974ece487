"""Steps of a tensor-parallel rank recorded as CUDA graphs."""
