// How the kernels of a step overlap: programmatic dependent launch (PTX ISA, "griddepcontrol").

namespace icebox {

// Until the kernel before has ended and its writes are seen; then blocks of the kernel behind may take what this one leaves
// free. Every kernel does this once, so when a block starts, all kernels but the one before have ended: until it waits, it
// may read weights and, past L1, what older kernels wrote, and must write nothing.
__device__ __forceinline__ void await_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace icebox
