// What the GPU shares with the host: loads and stores whose order both sides see, and the time.

namespace icebox {

using u64 = unsigned long long;

__device__ __forceinline__ int load_system(const int* p) {
  int v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// What another block of this GPU wrote, and with it what that block had seen: loads from where the value leads find no older
// lines in L1. They cannot come before it, so the compiler need not be told, which would cost it registers.
__device__ __forceinline__ int load_device(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ void store_device(int* p, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Without order: for what only a hint depends on, and for what older kernels wrote, past L1.
__device__ __forceinline__ int peek_system(const int* p) { return *static_cast<const volatile int*>(p); }

__device__ __forceinline__ void store_system(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_system(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace icebox
