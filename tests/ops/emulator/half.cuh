// Twin of half.cuh.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ u32 pack2(float low, float high) {
    return emulator::to_half(low, FP16) | (u32)emulator::to_half(high, FP16) << 16;
}
__device__ __forceinline__ float2 unpack2(u32 v) {
    return make_float2(emulator::from_half((u16)v, FP16), emulator::from_half((u16)(v >> 16), FP16));
}
__device__ __forceinline__ u16 pack1(float v) { return emulator::to_half(v, FP16); }
__device__ __forceinline__ float relu(float v) { return v <= 0 ? 0 : v; }
__device__ __forceinline__ float larger(float a, float b) { return a != a || a > b ? a : b; }
