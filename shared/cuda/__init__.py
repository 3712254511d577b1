"""NVIDIA GPUs through the driver API, without torch: contexts, pinned memory, copies. Imports CUDA only when asked."""
