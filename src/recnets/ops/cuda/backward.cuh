// What both ways of the training backward share (backward.cu, backward_wide.cu): dz_i of a tile on its way from global to
// shared memory, and m_i, its sums and dx on their way out.

constexpr int HALO = KH / 2, BYTES_H = bytes_of<SO, HALO>();
constexpr int TX = DX_TILES ? DX_TILES : 1, DX_CHANNELS = DX_SPLIT ? SI / SPLITS : SI;

struct Statistics {
    float mean, rstd, scale, shift;
};
__device__ __forceinline__ Statistics statistics(const float* sums, const float* gamma, const float* beta, int i, int c,
                                                 float pixels, float eps) {
    Statistics s;
    s.mean = BATCH ? sums[i * SO + c] / pixels : sums[i * SO + c];
    s.rstd = rsqrtf(fmaxf(BATCH ? sums[(D + i) * SO + c] / pixels - s.mean * s.mean : sums[(D + i) * SO + c], 0.f) + eps);
    s.scale = gamma[i * SO + c] * s.rstd;
    s.shift = beta[i * SO + c] - s.mean * s.scale;
    return s;
}

// Scale, shift, 1/sigma and -mean/sigma of this block's channels.
__device__ __forceinline__ void put_norm(float* norm, const float* sums, const float* gamma, const float* beta, int i,
                                         int channel, float pixels, float eps) {
    for (int c = threadIdx.x; c < NB; c += THREADS) {
        const Statistics s = statistics(sums, gamma, beta, i, channel + c, pixels, eps);
        norm[c] = s.scale, norm[NB + c] = s.shift, norm[2 * NB + c] = s.rstd, norm[3 * NB + c] = -s.mean * s.rstd;
    }
}

// dz_i as m*a + z*b + k, for all channels; the coefficients a, b and k follow each other.
__device__ __forceinline__ void norm_grad(float* coefficients, const float* sums, const float* grad_sums,
                                          const float* gamma, const float* beta, int i, float pixels, float eps) {
    for (int c = threadIdx.x; c < SO; c += THREADS) {
        const float mean_m = total(grad_sums, 0, i, c) / pixels, mean_mz = total(grad_sums, 1, i, c) / pixels;
        const Statistics s = statistics(sums, gamma, beta, i, c, pixels, eps);
        coefficients[c] = s.scale;
        coefficients[SO + c] = BATCH ? -s.scale * mean_mz * s.rstd : 0.f;
        coefficients[2 * SO + c] = BATCH ? s.scale * (mean_mz * s.rstd * s.mean - mean_m) : 0.f;
    }
    __syncthreads();
}
__device__ __forceinline__ uint4 combine(uint4 m, uint4 z, const float* a, const float* b, const float* k) {
    u32 *word = &m.x, *zword = &z.x;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 f = unpack2(word[w]), g = unpack2(zword[w]);
        word[w] = pack2(f.x * a[2 * w] + (g.x * b[2 * w] + k[2 * w]),
                        f.y * a[2 * w + 1] + (g.y * b[2 * w + 1] + k[2 * w + 1]));
    }
    return m;
}

// The same with the coefficients of 8 channels from c on, in registers.
struct Combination {
    float a[8], b[8], k[8];
    __device__ __forceinline__ Combination(const float* coefficients, int c) {
#pragma unroll
        for (int e = 0; e < 8; e++)
            a[e] = coefficients[c + e], b[e] = coefficients[SO + c + e], k[e] = coefficients[2 * SO + c + e];
    }
    __device__ __forceinline__ uint4 operator()(uint4 m, uint4 z) const { return combine(m, z, a, b, k); }
};

// With PREFETCH m_i and z_i are fetched into registers while the tile before is convolved.
struct NextTile {
    static constexpr int ITEMS = items_of<HALO>(), LOADERS = THREADS / CHUNKS, EACH = (ITEMS + LOADERS - 1) / LOADERS;
    uint4 v[EACH], y[EACH];

    __device__ __forceinline__ void fetch(const u16* m, const u16* z, int i, const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        const u16* from_m = m + (size_t)tile.first * SO + c;
        const u16* from_z = z + step_at(i, tile, batch) + c;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int number = loader + e * LOADERS;
            int slot, pixel;
            bool inside;
            v[e] = y[e] = make_uint4(0, 0, 0, 0);
            if (loader < LOADERS && number < ITEMS && item<HALO>(number, tile, batch, slot, pixel, inside)) {
                v[e] = load_fresh(from_m + (long)pixel * SO);
                y[e] = load_fresh(from_z + (long)pixel * SO);
            }
        }
    }
    __device__ __forceinline__ void make_dz(u32 to, u16* dz, const float* coefficients, int i, int channel,
                                            const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        if (loader >= LOADERS) return;
        const bool mine = c >= channel && c < channel + NB;
        const Combination combined(coefficients, c);
        u16* out = dz + step_at(i, tile, batch) + c;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int number = loader + e * LOADERS;
            int slot, pixel;
            bool inside;
            if (number >= ITEMS) continue;
            if (item<HALO>(number, tile, batch, slot, pixel, inside)) {
                v[e] = combined(v[e], y[e]);
                if (mine && inside) put_away(out + (long)pixel * SO, v[e]);
            }
            store_shared(to + chunk_at<SO, HALO>(slot, c), v[e]);
        }
    }
};

// m_i = g_i where h_i > 0, g_i = dh_i + acc; dh_i is in `ms` and gives way to m_i, z_i in `zs`. What other blocks will
// read goes also to global memory. norm: put_norm's.
template <int T>
__device__ __forceinline__ void put(const float (&acc)[MT][T][4], float (&sum)[NT][2], float (&products)[NT][2],
                                    const float* norm, u32 ms, u32 zs, u16* out, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int c = (wn * NT + n) * 8 + lane % 4 * 2;
        const float2 scale = *(float2*)(norm + c), shift = *(float2*)(norm + NB + c);
        const float2 rstd = *(float2*)(norm + 2 * NB + c), centre = *(float2*)(norm + 3 * NB + c);
        u32 pres[MT][2], dhs[MT][2];  // all loads before the first store
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int q = pixel_at(wm, m, half * 8 + lane / 4);
                if (q >= count) continue;
                pres[m][half] = load_shared1(zs + own_at(q, c * 2));
                dhs[m][half] = load_shared1(ms + own_at(q, c * 2));
            }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int q = pixel_at(wm, m, half * 8 + lane / 4);
                if (q >= count) continue;
                const float2 pre = unpack2(pres[m][half]), dh = unpack2(dhs[m][half]);
                const float a = !RELU || pre.x * scale.x + shift.x > 0 ? acc[m][n][half * 2] + dh.x : 0.f;
                const float b = !RELU || pre.y * scale.y + shift.y > 0 ? acc[m][n][half * 2 + 1] + dh.y : 0.f;
                const u32 v = pack2(a, b);
                store_shared(ms + own_at(q, c * 2), v);
                if (SINGLE && shared_with_others(q, HALO)) *(u32*)(out + (size_t)q * SO + c) = v;
                sum[n][0] += a, sum[n][1] += b;
                products[n][0] += a * (pre.x * rstd.x + centre.x);
                products[n][1] += b * (pre.y * rstd.y + centre.y);
            }
    }
}

// dx of a warp's tiles, of which the first has number `first` of the sums.
template <int T>
__device__ __forceinline__ void put_dx(const float (&sums)[MT][T][4], int first, u16* dx, int i, int split, const Tile& tile, int batch) {
    if (!DX_TILES || (!DX_SPLIT && split)) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    u16* out = dx + (size_t)tile.first * X_STRIDE + x_step(i, batch) + (DX_SPLIT ? split * DX_CHANNELS : 0);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int q = pixel_at(wm, m, half * 8 + lane / 4);
            if (q >= tile.count) continue;
#pragma unroll
            for (int n = 0; n < TX; n++) {
                const int c = (wn * TX + n) * 8 + lane % 4 * 2;
                if (c < DX_CHANNELS)
                    *(u32*)(out + (size_t)q * X_STRIDE + c) = pack2(sums[m][first + n][half * 2], sums[m][first + n][half * 2 + 1]);
            }
        }
}
