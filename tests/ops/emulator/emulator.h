// CUDA C++ for g++: the words that the kernels use, and what the twins of headers with PTX call.
// A kernel's threads are fibers of one CPU thread; emulator.cpp switches between them where they wait.
#pragma once

#include <string.h>

#include <utility>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

// Aligned as in CUDA, so that the compiler's checks find what the device would refuse.
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float rsqrtf(float v) { return 1 / __builtin_sqrtf(v); }
inline float __uint_as_float(unsigned v) {
    float out;
    memcpy(&out, &v, 4);
    return out;
}
inline unsigned __float_as_uint(float v) {
    unsigned out;
    memcpy(&out, &v, 4);
    return out;
}
template <class T>
T atomicAdd(T* at, T v) {
    const T before = *at;
    *at = before + v;
    return before;
}
void __syncthreads();

namespace emulator {

constexpr unsigned SHARED_BASE = 1024;  // where a block's shared memory begins; what lies below is the system's

// End the launch with an error.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// A number below `below`, from the launch's seed.
unsigned chance(unsigned below);

// Wait until ready(context); `what` is for the report of a deadlock.
void wait(bool (*ready)(void*), void* context, const char* what);
template <class F>
void wait_until(F ready, const char* what) {
    wait([](void* f) { return (*(F*)f)(); }, &ready, what);
}
// Now and then, let others go first.
void pause();

// This block's shared memory: its dynamic part, a variable beside it, and `bytes` at an address of the former, checked.
unsigned char* dynamic_shared();
unsigned char* static_shared(int variable, int bytes);
unsigned char* shared(unsigned address, int bytes);
unsigned shared_address(const void* p);
// Global memory, which must be aligned.
const void* global(const void* p, int bytes);

// What all 32 lanes of a warp do together: the last to come computes for all from their inputs.
void together(const char* what, const void* in, void* out, void (*all)(const void* const* in, void* const* out));
template <class In, class Out>
void together(const char* what, const In& in, Out& out, void (*all)(const In* const* in, Out* const* out)) {
    together(what, (const void*)&in, (void*)&out, (void (*)(const void* const*, void* const*))all);
}

// Copies by this thread that arrive by the time it waits for their group, or before.
void copy_async(unsigned to, const void* from, int bytes, bool ok);
void copy_commit();
void copy_wait(int left);

// A product of a warpgroup: sums (64 x n) += a * b, by their descriptors, some time before the wait for it.
struct Wgmma {
    float* sums;
    int n;
    unsigned long long a, b;
    bool fp16, by_k;
};
void wgmma_fence();
void wgmma(const Wgmma& own);
void wgmma_commit();
void wgmma_wait();
// Let products see what this thread's stores, and its copies that it has waited for, left.
void publish_shared();
void stored(unsigned to);  // by this thread

unsigned cluster_rank();
void cluster_arrive();
void cluster_wait();
void barrier_init(unsigned at, int count);
void barrier_arrive(unsigned at, int bytes);
void barrier_wait(unsigned at, int parity);
void store_cluster(unsigned at, unsigned barrier, int rank, uint4 v);

// Of half precision.
float from_half(unsigned short v, bool fp16);
unsigned short to_half(float v, bool fp16);
struct Fragments {
    float c[4];
    unsigned a[4], b[2];
    bool fp16;
};
using Sums = float[4];
void product(const Fragments* const* in, Sums* const* out);

// A launch: grid, threads a block, bytes of shared memory a block, blocks a cluster, whether all blocks are there at
// once, and the seed of the order in which threads run.
struct Launch {
    unsigned grid[3], threads, shared, cluster, cooperative, seed;
};
// An error, or null.
const char* run(const char* name, const Launch& launch, void (*body)(void*), void* context);

template <class... A>
struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I>
    void operator()(std::index_sequence<I...>) { kernel(*(A*)arguments[I]...); }
    static void body(void* self) { (*(Call*)self)(std::index_sequence_for<A...>()); }
};
template <class... A>
const char* launch(const char* name, void (*kernel)(A...), const Launch& launch, void** arguments, const int* sizes,
                   int count) {
    const int expected[] = {(int)sizeof(A)...};
    if (count != sizeof...(A)) return "the kernel has another number of arguments";
    for (int i = 0; i < count; i++)
        if (sizes[i] != expected[i]) return "an argument has another size in the kernel";
    Call<A...> call = {kernel, arguments};
    return run(name, launch, Call<A...>::body, &call);
}

}  // namespace emulator

template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bit) {
    struct In { T v; int bit; };
    if (mask != ~0u) emulator::fail("a shuffle of some lanes only, which the emulator has not");
    T got;
    emulator::together<In, T>("__shfl_xor_sync", {v, bit}, got, [](const In* const* in, T* const* out) {
        for (int lane = 0; lane < 32; lane++) *out[lane] = in[lane ^ in[lane]->bit]->v;
    });
    return got;
}
inline void __syncwarp() {
    int none = 0;
    emulator::together<int, int>("__syncwarp", none, none, [](const int* const*, int* const*) {});
}

#define EMULATED(kernel)                                                                                        \
    extern "C" const char* launch_##kernel(const emulator::Launch& launch, void** arguments, const int* sizes, \
                                           int count) {                                                        \
        return emulator::launch(#kernel, kernel, launch, arguments, sizes, count);                             \
    }
