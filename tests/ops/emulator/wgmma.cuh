// Twin of wgmma.cuh.

typedef unsigned long long u64;

__device__ __forceinline__ u64 matrix_at(u32 at, int next_k, int next_mn) {
    return (u64)(at >> 4) | (u64)(next_k >> 4) << 16 | (u64)(next_mn >> 4) << 32;
}
template <int N>
__device__ __forceinline__ void wgmma(float* sums, u64 a, u64 b) { emulator::wgmma({sums, N, a, b, FP16}); }

template <int T, int COUNT>
__device__ __forceinline__ void hold(float (&sums)[T][COUNT]) {}
template <int T, int COUNT>
__device__ __forceinline__ void wgmma_fence(float (&sums)[T][COUNT]) { emulator::wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator::wgmma_commit(); }
template <int T, int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&sums)[T][COUNT]) { emulator::wgmma_wait(); }
__device__ __forceinline__ void publish_shared() { emulator::publish_shared(); }
