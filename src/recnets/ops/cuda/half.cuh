// Half precision: FP16, else bfloat16.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ u32 pack2(float low, float high) {
    u32 out;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}

__device__ __forceinline__ float2 unpack2(u32 v) {
#if FP16
    float2 out;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(out.x), "=f"(out.y) : "r"(v));
    return out;
#else
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
#endif
}

__device__ __forceinline__ u16 pack1(float v) { return (u16)(pack2(v, 0.f) & 0xffffu); }

// Not a number stays so, that a run which diverges shows.
__device__ __forceinline__ float relu(float v) {
    float out;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(v));
    return out;
}
__device__ __forceinline__ float larger(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}
