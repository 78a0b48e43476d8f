// Twin of memory.cuh.

__device__ __forceinline__ u32 shared_address(const void* p) { return emulator::shared_address(p); }

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool ok) {
    emulator::copy_async(to, from, BYTES, ok);
}
__device__ __forceinline__ void copy_commit() { emulator::copy_commit(); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() { emulator::copy_wait(LEFT); }

__device__ __forceinline__ void store_shared(u32 at, u32 v) {
    *(u32*)emulator::shared(at, 4) = v;
    emulator::stored(at);
}
__device__ __forceinline__ uint4 load_shared(u32 at) { return *(uint4*)emulator::shared(at, 16); }
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
    *(uint4*)emulator::shared(at, 16) = v;
    emulator::stored(at);
}
__device__ __forceinline__ u32 load_shared1(u32 at) { return *(u32*)emulator::shared(at, 4); }
__device__ __forceinline__ uint2 load_shared2(u32 at) { return *(uint2*)emulator::shared(at, 8); }
__device__ __forceinline__ void clear_shared(u32 at, int bytes) {
    for (int b = threadIdx.x * 16; b < bytes; b += THREADS * 16) store_shared(at + b, make_uint4(0, 0, 0, 0));
}
__device__ __forceinline__ uint4 load_fresh(const void* p) { return *(const uint4*)emulator::global(p, 16); }
__device__ __forceinline__ float load_fresh(const float* p) { return *(const float*)emulator::global(p, 4); }
__device__ __forceinline__ void store_streaming(void* p, uint4 v) { *(uint4*)emulator::global(p, 16) = v; }
__device__ __forceinline__ float4 load_constant(const float4* p) { return *(const float4*)emulator::global(p, 16); }

// Lane l has the address of row l % 8 of matrix l / 8, and gets of each matrix row l / 4, elements l % 4 * 2 and the
// next; transposed, rows for columns.
using Row = const u16*;
using Four = u32[4];
__device__ __forceinline__ void matrices(u32 (&v)[4], u32 at) {
    const Row row = (Row)emulator::shared(at, 16);
    emulator::together<Row, Four>("ldmatrix", row, v, [](const Row* const* rows, Four* const* out) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) memcpy(&(*out[lane])[m], *rows[m * 8 + lane / 4] + lane % 4 * 2, 4);
    });
}
__device__ __forceinline__ void matrices_transposed(u32 (&v)[4], u32 at) {
    const Row row = (Row)emulator::shared(at, 16);
    emulator::together<Row, Four>("ldmatrix.trans", row, v, [](const Row* const* rows, Four* const* out) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                const Row* const* first = rows + m * 8 + lane % 4 * 2;
                (*out[lane])[m] = (*first[0])[lane / 4] | (u32)(*first[1])[lane / 4] << 16;
            }
    });
}

__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const emulator::Fragments in = {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}, FP16};
    emulator::together<emulator::Fragments, emulator::Sums>("mma", in, c, emulator::product);
}

__device__ __forceinline__ void arrive(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) *counter += 1;
    emulator::pause();
}
__device__ __forceinline__ void await(const u32* counter) {
    if (threadIdx.x == 0) emulator::wait_until([&] { return *counter >= gridDim.x; }, "await");
    __syncthreads();
}
