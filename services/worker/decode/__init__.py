"""Decoding on a GPU: a step as one sequence of fused kernels, captured as a CUDA graph, that waits for experts itself."""
