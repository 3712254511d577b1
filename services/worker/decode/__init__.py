"""Decoding on a GPU: a step is one sequence of fused kernels, captured as a graph, that waits for experts itself."""
