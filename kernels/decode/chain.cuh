// How the kernels of a step overlap: programmatic dependent launch (PTX ISA, "griddepcontrol").

namespace icebox {

// Until the kernel before has ended and its writes are seen; then blocks of the kernel behind may take what this one leaves
// free. Every block does this, or leaves, so when one starts, all kernels but the one before have ended: until it waits, it
// may read weights and, past L1, what older kernels wrote, and must write nothing.
__device__ __forceinline__ void await_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// A row of floats on its way to L2 while the kernel before still runs: for weights that are needed late and would then be
// waited for. By all threads of the block.
__device__ __forceinline__ void prefetch_row(const float* row, int n) {
  for (int i = 32 * threadIdx.x; i < n; i += 32 * blockDim.x) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
}

}  // namespace icebox
