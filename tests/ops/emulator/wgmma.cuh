// Twin of wgmma.cuh.

typedef unsigned long long u64;

__device__ __forceinline__ u64 matrix_at(u32 at, int next_k, int next_mn) {
    return (u64)next_mn << 32 | (u32)(at + (next_k << 16));
}
__device__ __forceinline__ u32 uniform(u32 v) { return v; }
template <int N, bool BY_K>
__device__ __forceinline__ void wgmma(float* sums, u64 a, u64 b) { emulator::wgmma({sums, N, a, b, FP16, BY_K}); }

template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT]) {}
template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT][4]) {}
template <class S>
__device__ __forceinline__ void wgmma_fence(S& sums) { emulator::wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator::wgmma_commit(); }
template <class S>
__device__ __forceinline__ void wgmma_wait(S& sums) { emulator::wgmma_wait(); }
__device__ __forceinline__ void publish_shared() { emulator::publish_shared(); }
