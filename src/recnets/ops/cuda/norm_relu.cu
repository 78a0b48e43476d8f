// BN + ReLU of a whole map in training, and with POOL the 2x2 maxima of it, in one cooperative launch each way: sums over
// the map, a wait for all blocks, then the output. With KEEP a block's share of the map stays in shared memory between
// the two, else it is read twice. A thread keeps to one chunk of 8 channels.
//
// Constants: C (channels), POOL, KEEP, H, W, THREADS. A unit is a pixel, or with POOL a window of four. SEGMENT: the output
// and its gradient are a map of so many channels for each segment of them, as a CRC layer reads them; with C it is one.

constexpr int CHUNKS = C / 8, LOADERS = THREADS / CHUNKS, PIXELS = POOL ? 4 : 1, BATCH = POOL ? 1 : 4;

// Pixel k of a unit.
__device__ __forceinline__ size_t pixel_of(int unit, int k) {
    if (!POOL) return unit;
    const int x = unit % (W / 2), y = unit / (W / 2) % (H / 2), image = unit / ((W / 2) * (H / 2));
    return ((size_t)image * H + 2 * y + k / 2) * W + 2 * x + k % 2;
}
__device__ __forceinline__ uint4 load(const u16* map, size_t pixel, int chunk) {
    return *(const uint4*)(map + pixel * C + chunk * 8);
}
__device__ __forceinline__ void store(u16* map, size_t pixel, int chunk, uint4 v) {
    *(uint4*)(map + pixel * C + chunk * 8) = v;
}
// Of the output.
__device__ __forceinline__ size_t segment_at(int unit, int chunk, int units) {
    return ((size_t)(chunk * 8 / SEGMENT) * units + unit) * SEGMENT + chunk * 8 % SEGMENT;
}
__device__ __forceinline__ void values(float (&out)[8], const uint4& v) {
    const u32* word = &v.x;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 f = unpack2(word[w]);
        out[2 * w] = f.x, out[2 * w + 1] = f.y;
    }
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}

// Add every thread's two sums of 8 channels to the map's, (2, C). scratch: THREADS x 16 floats.
__device__ __forceinline__ void add_sums(const float (&first)[8], const float (&second)[8], float* scratch, float* sums) {
    const int chunk = threadIdx.x % CHUNKS, loader = threadIdx.x / CHUNKS;
    if (loader < LOADERS) {
        float4* at = (float4*)(scratch + loader * 2 * C + chunk * 8);
        at[0] = make_float4(first[0], first[1], first[2], first[3]);
        at[1] = make_float4(first[4], first[5], first[6], first[7]);
        at = (float4*)(scratch + loader * 2 * C + C + chunk * 8);
        at[0] = make_float4(second[0], second[1], second[2], second[3]);
        at[1] = make_float4(second[4], second[5], second[6], second[7]);
    }
    __syncthreads();
    constexpr int GROUPS = THREADS / (2 * C) > 0 ? THREADS / (2 * C) : 1;
    for (int e = threadIdx.x; e < 2 * C * GROUPS; e += THREADS) {
        float v = 0;
        for (int row = e / (2 * C); row < LOADERS; row += GROUPS) v += scratch[row * 2 * C + e % (2 * C)];
        atomicAdd(sums + e % (2 * C), v);
    }
}

struct Share {
    int first, last, chunk, loader;
    bool active;
    __device__ __forceinline__ Share(int units, int each) {
        first = blockIdx.x * each;
        last = min(first + each, units);
        chunk = threadIdx.x % CHUNKS;
        loader = threadIdx.x / CHUNKS;
        active = loader < LOADERS;
    }
    // Where `slot` of a unit is kept, `slots` to a unit.
    __device__ __forceinline__ u32 kept(u32 memory, int unit, int slot, int slots) const {
        return memory + (((unit - first) * slots + slot) * CHUNKS + chunk) * 16;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, KEEP ? 1 : 2)
norm_relu_forward(const u16* y, const float* gamma, const float* beta, u16* out, float* sums, u32* counter, int units,
                  int each, float pixels, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* scratch = (float*)memory;       // THREADS x 16
    float* scale = scratch + THREADS * 16;  // C
    float* shift = scale + C;
    const u32 kept = shared_address(shift + C);
    const Share share(units, each);
    float sum[8] = {}, squares[8] = {};
    for (int u0 = share.first + share.loader; share.active && u0 < share.last; u0 += LOADERS * BATCH) {
        uint4 v[BATCH][PIXELS];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int k = 0; k < PIXELS; k++)
                if (u0 + b * LOADERS < share.last) v[b][k] = load(y, pixel_of(u0 + b * LOADERS, k), share.chunk);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (u0 + b * LOADERS >= share.last) continue;
#pragma unroll
            for (int k = 0; k < PIXELS; k++) {
                float f[8];
                values(f, v[b][k]);
#pragma unroll
                for (int e = 0; e < 8; e++) sum[e] += f[e], squares[e] += f[e] * f[e];
                if (KEEP) store_shared(share.kept(kept, u0 + b * LOADERS, k, PIXELS), v[b][k]);
            }
        }
    }
    add_sums(sum, squares, scratch, sums);
    arrive(counter);
    await(counter);
    for (int c = threadIdx.x; c < C; c += THREADS) {
        const float mean = load_fresh(sums + c) / pixels;
        const float var = fmaxf(load_fresh(sums + C + c) / pixels - mean * mean, 0.f);
        const float s = gamma[c] * rsqrtf(var + eps);
        scale[c] = s, shift[c] = beta[c] - mean * s;
    }
    __syncthreads();
    float s[8], t[8];
#pragma unroll
    for (int e = 0; e < 8; e++) s[e] = scale[share.chunk * 8 + e], t[e] = shift[share.chunk * 8 + e];
    for (int u0 = share.first + share.loader; share.active && u0 < share.last; u0 += LOADERS * BATCH) {
        uint4 v[BATCH][PIXELS];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int k = 0; k < PIXELS; k++)
                if (u0 + b * LOADERS < share.last)
                    v[b][k] = KEEP ? load_shared(share.kept(kept, u0 + b * LOADERS, k, PIXELS))
                                   : load(y, pixel_of(u0 + b * LOADERS, k), share.chunk);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (u0 + b * LOADERS >= share.last) continue;
            float best[8];
#pragma unroll
            for (int k = 0; k < PIXELS; k++) {
                float f[8];
                values(f, v[b][k]);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const float a = relu(f[e] * s[e] + t[e]);
                    best[e] = k == 0 ? a : larger(best[e], a);
                }
            }
            *(uint4*)(out + segment_at(u0 + b * LOADERS, share.chunk, units)) = pack8(best);
        }
    }
}

// Of a unit's pre-activations: m for each pixel and channel e, g where it is the (first) maximum and positive.
__device__ __forceinline__ void route(float (&m)[PIXELS], const float (&pre)[PIXELS][8], int e, float g, float scale,
                                      float shift) {
    float a[PIXELS], best = 0.f;
#pragma unroll
    for (int k = 0; k < PIXELS; k++) {
        a[k] = pre[k][e] * scale + shift;
        best = k == 0 ? a[k] : larger(best, a[k]);
    }
    bool taken = !(best > 0.f);
#pragma unroll
    for (int k = 0; k < PIXELS; k++) {
        m[k] = !taken && a[k] == best ? g : 0.f;
        taken |= a[k] == best;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, KEEP ? 1 : 2)
norm_relu_backward(const u16* g, const u16* y, const float* sums, const float* gamma, const float* beta, u16* dy,
                   float* grad_sums, u32* counter, int units, int each, float pixels, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* scratch = (float*)memory;       // THREADS x 16
    float* scale = scratch + THREADS * 16;  // C each: scale, shift, 1/sigma, mean
    float *shift = scale + C, *rstd = shift + C, *mean = rstd + C;
    const u32 kept = shared_address(mean + C);
    const Share share(units, each);
    for (int c = threadIdx.x; c < C; c += THREADS) {
        mean[c] = sums[c] / pixels;
        rstd[c] = rsqrtf(fmaxf(sums[C + c] / pixels - mean[c] * mean[c], 0.f) + eps);
        scale[c] = gamma[c] * rstd[c];
        shift[c] = beta[c] - mean[c] * scale[c];
    }
    __syncthreads();
    const int c0 = share.chunk * 8;
    float s[8], t[8], sum[8] = {}, products[8] = {};
#pragma unroll
    for (int e = 0; e < 8; e++) s[e] = scale[c0 + e], t[e] = shift[c0 + e];
    // Twice over the share: first the sums, then, when all blocks have added theirs, the gradient.
    float b[8], k0[8];
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        for (int u0 = share.first + share.loader; share.active && u0 < share.last; u0 += LOADERS * BATCH) {
            uint4 v[BATCH][PIXELS], grad[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const int unit = u0 + j * LOADERS;
                if (unit >= share.last) continue;
                const bool near = KEEP && pass;
                grad[j] = near ? load_shared(share.kept(kept, unit, PIXELS, PIXELS + 1))
                               : *(const uint4*)(g + segment_at(unit, share.chunk, units));
#pragma unroll
                for (int k = 0; k < PIXELS; k++)
                    v[j][k] = near ? load_shared(share.kept(kept, unit, k, PIXELS + 1)) : load(y, pixel_of(unit, k), share.chunk);
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const int unit = u0 + j * LOADERS;
                if (unit >= share.last) continue;
                float pre[PIXELS][8], gs[8], out[PIXELS][8];
                values(gs, grad[j]);
#pragma unroll
                for (int k = 0; k < PIXELS; k++) values(pre[k], v[j][k]);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    float m[PIXELS];
                    route(m, pre, e, gs[e], s[e], t[e]);
#pragma unroll
                    for (int k = 0; k < PIXELS; k++) {
                        if (pass) out[k][e] = m[k] * s[e] + (pre[k][e] * b[e] + k0[e]);
                        else sum[e] += m[k], products[e] += m[k] * pre[k][e];
                    }
                }
#pragma unroll
                for (int k = 0; k < PIXELS; k++) {
                    if (pass) store(dy, pixel_of(unit, k), share.chunk, pack8(out[k]));
                    else if (KEEP) store_shared(share.kept(kept, unit, k, PIXELS + 1), v[j][k]);
                }
                if (!pass && KEEP) store_shared(share.kept(kept, unit, PIXELS, PIXELS + 1), grad[j]);
            }
        }
        if (pass) return;
        // The products are with y; with yhat = (y - mean)/sigma they follow.
#pragma unroll
        for (int e = 0; e < 8; e++) products[e] = (products[e] - mean[c0 + e] * sum[e]) * rstd[c0 + e];
        add_sums(sum, products, scratch, grad_sums);
        arrive(counter);
        await(counter);
        // Once a block: all threads of all blocks would ask for the same few lines.
        for (int c = threadIdx.x; c < 2 * C; c += THREADS) scratch[c] = load_fresh(grad_sums + c) / pixels;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float mean_m = scratch[c0 + e], mean_my = scratch[C + c0 + e];
            b[e] = -s[e] * mean_my * rstd[c0 + e];
            k0[e] = s[e] * (mean_my * rstd[c0 + e] * mean[c0 + e] - mean_m);
        }
    }
}
