// What both ways of the training forward share (forward.cu, forward_wide.cu): h_i = ReLU(BN_i(z_i)) of a tile on its way
// from global to shared memory, and z_i and its sums on their way out.

constexpr int HALO_X = KX / 2, HALO_H = KH / 2, BYTES_X = bytes_of<SI, HALO_X>(), BYTES_H = bytes_of<SO, HALO_H>();

// BN of step i as z*scale + shift, for all channels.
__device__ __forceinline__ void affine(float* scale, float* shift, const float* sums, const float* totals,
                                       const float* gamma, const float* beta, int i, float pixels, float eps) {
    for (int c = threadIdx.x; c < SO; c += THREADS) {
        const float mean = BATCH ? total(sums, 0, i, c) / pixels : totals[i * SO + c];
        const float var = fmaxf(BATCH ? total(sums, 1, i, c) / pixels - mean * mean : totals[(D + i) * SO + c], 0.f);
        const float s = gamma[i * SO + c] * rsqrtf(var + eps);
        scale[c] = s;
        shift[c] = beta[i * SO + c] - mean * s;
    }
    __syncthreads();
}

__device__ __forceinline__ float activated(float v) { return RELU ? relu(v) : v; }

// ReLU(z*scale + shift) of 8 channels.
__device__ __forceinline__ uint4 sigma(uint4 v, const float* scale, const float* shift) {
    u32* word = &v.x;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 f = unpack2(word[w]);
        word[w] = pack2(activated(f.x * scale[2 * w] + shift[2 * w]), activated(f.y * scale[2 * w + 1] + shift[2 * w + 1]));
    }
    return v;
}

// h_i of a tile, z_i from global memory: into shared memory with its halo (KEEP), and this block's channels into h.
template <int HALO, bool KEEP>
__device__ __forceinline__ void activate(u32 to, const u16* z, u16* h, const float* scale, const float* shift, int i,
                                         int channel, const Tile& tile, int batch) {
    constexpr int SLOTS = slots_of(HALO), LOADERS = THREADS / CHUNKS;
    constexpr int EACH = (SLOTS + LOADERS - 1) / LOADERS, AT_ONCE = EACH < 4 ? EACH : 4;
    const int c = threadIdx.x % CHUNKS * 8, loader = threadIdx.x / CHUNKS;
    if (loader >= LOADERS) return;
    const bool mine = c >= channel && c < channel + NB;
    if (!KEEP && !mine) return;
    float s[8], t[8];
#pragma unroll
    for (int k = 0; k < 8; k++) s[k] = scale[c + k], t[k] = shift[c + k];
    const u16* from = z + step_at(i, tile, batch) + c;
    u16* out = h + (size_t)tile.first * (D * SO) + i * SO + c;
    for (int slot0 = loader; slot0 < SLOTS; slot0 += LOADERS * AT_ONCE) {
        uint4 v[AT_ONCE];
        int pixel[AT_ONCE];
        bool ok[AT_ONCE], inside[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int slot = slot0 + k * LOADERS;
            ok[k] = slot < SLOTS && pixel_of<HALO>(slot, tile, batch, pixel[k], inside[k]);
            v[k] = make_uint4(0, 0, 0, 0);
            if (ok[k]) v[k] = load_fresh(from + (long)pixel[k] * SO);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int slot = slot0 + k * LOADERS;
            if (ok[k]) v[k] = sigma(v[k], s, t);
            if (ok[k] && mine && inside[k]) *(uint4*)(out + (long)pixel[k] * (D * SO)) = v[k];
            if (KEEP && slot < SLOTS) store_shared(to + chunk_at<SO, HALO_H>(slot, c), v[k]);
        }
    }
}

// With PREFETCH z_i is fetched into registers while the tile before is convolved.
struct NextTile {
    static constexpr int ITEMS = items_of<HALO_H>(), LOADERS = THREADS / CHUNKS, EACH = (ITEMS + LOADERS - 1) / LOADERS;
    uint4 v[EACH];

    __device__ __forceinline__ void fetch(const u16* z, int i, const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        const u16* from = z + step_at(i, tile, batch) + c;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int e = loader + k * LOADERS;
            int slot, pixel;
            bool inside;
            v[k] = make_uint4(0, 0, 0, 0);
            if (loader < LOADERS && e < ITEMS && item<HALO_H>(e, tile, batch, slot, pixel, inside))
                v[k] = load_fresh(from + (long)pixel * SO);
        }
    }
    __device__ __forceinline__ void activate(u32 to, u16* h, const float* scale, const float* shift, int i, int channel,
                                             const Tile& tile, int batch) {
        const int thread = thread_number(), c = thread % CHUNKS * 8, loader = thread / CHUNKS;
        if (loader >= LOADERS) return;
        const bool mine = c >= channel && c < channel + NB;
        float s[8], t[8];
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = scale[c + k], t[k] = shift[c + k];
        u16* out = h + (size_t)tile.first * (D * SO) + i * SO + c;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int e = loader + k * LOADERS;
            int slot, pixel;
            bool inside;
            if (e >= ITEMS) continue;
            if (item<HALO_H>(e, tile, batch, slot, pixel, inside)) {
                v[k] = sigma(v[k], s, t);
                if (mine && inside) put_away(out + (long)pixel * (D * SO), v[k]);
            }
            store_shared(to + chunk_at<SO, HALO_H>(slot, c), v[k]);
        }
    }
};

// z_i of a warp's tiles into `zs`, what other blocks will read also to global memory; and its sums.
__device__ __forceinline__ void put(const float (&acc)[MT][NT][4], float (&sum)[NT][2], float (&squares)[NT][2], u32 zs,
                                    u16* out, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int q = pixel_at(wm, m, half * 8 + lane / 4);
            if (q >= count) continue;
            const bool now = SINGLE && shared_with_others(q, HALO_H);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int c = (wn * NT + n) * 8 + lane % 4 * 2;
                const float a = acc[m][n][half * 2], b = acc[m][n][half * 2 + 1];
                const u32 v = pack2(a, b);
                store_shared(zs + own_at(q, c * 2), v);
                if (now) *(u32*)(out + (size_t)q * SO + c) = v;
                sum[n][0] += a, sum[n][1] += b;
                squares[n][0] += a * a, squares[n][1] += b * b;
            }
        }
}
