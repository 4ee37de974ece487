"""CPU kernels in C++: batch-invariant, on weights as the checkpoint stores them. The sources are in csrc/."""
