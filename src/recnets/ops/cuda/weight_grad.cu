// Gradients of the kernels: dW[tap, ci, co] = sum over steps i and pixels p of a_{i-LAG}(p + tap)[ci] * dz_i(p)[co],
// with LAG 1 and a = h for W_h, LAG 0 and a = x for W_x. The product runs over pixels. A block takes a share of the
// (tile, step) pairs and CI_BLOCK x CO_BLOCK channels; a warp takes one row of taps (WM = KW of them) and every WN-th 16
// pixels of a tile. With XB, XB channels of a second input x with LAG 0 come along, its share of W_x's gradient.
// With STAGGERED the groups of warps fetch the next tile at different times, so that some warps always compute.
// Blocks leave parts, (gridDim.x, taps, CA or SI, SO), to be added in a fixed order. CA are a's channels a step.

constexpr int HALO = KW / 2, COLUMNS = W + 2 * HALO, LINES = ROWS + 2 * HALO;
constexpr int PITCH_A = pitch_of(CI_BLOCK), PITCH_X = XB ? pitch_of(XB) : 0, PITCH_G = pitch_of(CO_BLOCK);
constexpr int CHUNKS_OF_16 = round_up(PIXELS, 16) / 16, TURNS = (CHUNKS_OF_16 + WN - 1) / WN;
constexpr int BYTES_A = slots_of(HALO) * PITCH_A, BYTES_X = slots_of(HALO) * PITCH_X;
constexpr int STAGE = BYTES_A + BYTES_X + CHUNKS_OF_16 * 16 * PITCH_G;
constexpr int TO = CO_BLOCK / 16, TI = CI_BLOCK / 8, TX = XB ? XB / 8 : 1;

// Copies of a segment of CHANNELS of a tile with its halo. Which slots a thread fills is the same for every tile, and
// worked out once. Slots beside the map are never written.
template <int CHANNELS, int PITCH>
struct Copier {
    static constexpr int VECTOR = CHANNELS % 8 == 0 ? 8 : 4, CHUNKS_HERE = CHANNELS / VECTOR;
    static constexpr int LOADERS = THREADS / CHUNKS_HERE, EACH = (slots_of(HALO) + LOADERS - 1) / LOADERS;
    int where[EACH];  // row and pixel relative to the tile's first, or -1

    __device__ __forceinline__ Copier() {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int slot = threadIdx.x / CHUNKS_HERE + k * LOADERS, column = slot % COLUMNS - HALO;
            const int row = slot / COLUMNS % LINES - HALO, image = slot / (LINES * COLUMNS);
            const bool ok = threadIdx.x / CHUNKS_HERE < LOADERS && slot < slots_of(HALO) && column >= 0 && column < W &&
                            (TILES_A_MAP > 1 || (row >= 0 && row < H));
            where[k] = ok ? (row + 8) << 20 | ((image * ROWS + row) * W + column + 4096) : -1;
        }
    }
    __device__ __forceinline__ void operator()(u32 to, const u16* from, int stride, const Tile& tile) const {
        const int slot = threadIdx.x / CHUNKS_HERE, chunk = threadIdx.x % CHUNKS_HERE;
        const u16* base = from + (long)tile.first * stride + chunk * VECTOR;
        to += slot * PITCH + chunk * VECTOR * 2;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (where[k] < 0) continue;
            const int row = (where[k] >> 20) - 8, pixel = (where[k] & 0xfffff) - 4096;
            const bool ok = TILES_A_MAP == 1 ? pixel < tile.count : (unsigned)(tile.row + row) < H;
            copy_async<VECTOR * 2>(to + k * LOADERS * PITCH, ok ? base + pixel * stride : from, ok);
        }
    }
};

__device__ __forceinline__ void copy_pixels(u32 to, const u16* from, int stride, const Tile& tile) {
    constexpr int HERE = CO_BLOCK / 8;
    for (int e = threadIdx.x; e < CHUNKS_OF_16 * 16 * HERE; e += THREADS) {
        const int q = e / HERE, chunk = e % HERE;
        const bool ok = q < tile.count;
        copy_async<16>(to + q * PITCH_G + chunk * 16, ok ? from + (size_t)(tile.first + q) * stride + chunk * 8 : from, ok);
    }
}

// acc[kx] += dz^T * a, for one row of taps and 16 pixels.
template <int T, int PITCH>
__device__ __forceinline__ void accumulate(float (&acc)[KW][TO][T][4], const u32 (&g)[TO][4], u32 row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int kx = 0; kx < KW; kx++)
#pragma unroll
        for (int n = 0; n < T; n += 2) {
            u32 b[4];
            const bool odd = n + 1 == T;  // the last odd 8 channels are read twice
            matrices_transposed(b, row + kx * PITCH + n * 16 + (odd ? 0 : lane / 16 * 16));
#pragma unroll
            for (int o = 0; o < TO; o++) {
                product(acc[kx][o][n], g[o], b[0], b[1]);
                if (!odd) product(acc[kx][o][n + 1 < T ? n + 1 : n], g[o], b[2], b[3]);
            }
        }
}

// The warps' sums, groups in a fixed order, through shared memory: [tap][channel][co] of one part.
template <int T>
__device__ __forceinline__ void put_part(const float (&acc)[KW][TO][T][4], float* block, float* part, int channels,
                                         int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ky = warp / WN, group = warp % WN;
    for (int turn = 0; turn < WN; turn++) {
        __syncthreads();
        if (turn != group) continue;
#pragma unroll
        for (int kx = 0; kx < KW; kx++)
#pragma unroll
            for (int o = 0; o < TO; o++)
#pragma unroll
                for (int n = 0; n < T; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int c = n * 8 + lane % 4 * 2 + (e & 1), co = o * 16 + lane / 4 + (e >> 1) * 8;
                        float* at = block + ((ky * KW + kx) * (T * 8) + c) * (CO_BLOCK + 4) + co;
                        *at = turn == 0 ? acc[kx][o][n][e] : *at + acc[kx][o][n][e];
                    }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < KW * KW * T * 8 * CO_BLOCK; e += THREADS) {
        const int co = e % CO_BLOCK, c = e / CO_BLOCK % (T * 8), tap = e / (CO_BLOCK * T * 8);
        if (first + c < channels)
            part[(tap * channels + first + c) * SO + blockIdx.z * CO_BLOCK + co] = block[(tap * T * 8 + c) * (CO_BLOCK + 4) + co];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
weight_grad(const u16* a, const u16* x, const u16* dz, float* parts, float* parts_x, int batch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ky = warp / WN, group = warp % WN;
    const int ci0 = blockIdx.y * CI_BLOCK, x0 = blockIdx.y * XB, co0 = blockIdx.z * CO_BLOCK;
    constexpr int FIRST = XB ? 0 : LAG, EACH = D - FIRST;  // steps
    const int all = tiles_of(batch) * EACH;
    float acc[KW][TO][TI][4] = {}, acc_x[KW][TO][TX][4] = {};
    const Copier<CI_BLOCK < CA ? CI_BLOCK : CA, PITCH_A> copy_a;
    const Copier<XB ? (XB < SI ? XB : SI) : 8, PITCH_X> copy_x;
    clear_shared(base, STAGES * STAGE);
    __syncthreads();
    auto fetch = [&](int work, int stage) {
        if (work < all) {
            const int i = work % EACH + FIRST;
            const Tile tile = tile_at(work / EACH, batch);
            const u32 to = base + stage * STAGE;
            if (i >= LAG) copy_a(to, a + (LAG ? (i - LAG) * CA : x_step(i, batch)) + ci0, LAG ? D * CA : X_STRIDE, tile);
            if (XB) copy_x(to + BYTES_A, x + x_step(i, batch) + x0, X_STRIDE, tile);
            copy_pixels(to + BYTES_A + BYTES_X, dz + (size_t)i * batch * (H * W) * SO + co0, SO, tile);
        }
        copy_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) fetch(blockIdx.x + s * gridDim.x, s);
    int stage = 0;
    for (int work = blockIdx.x; work < all; work += gridDim.x) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        const int following = work + (STAGES - 1) * gridDim.x, place = (stage + STAGES - 1) % STAGES;
        if (!STAGGERED) fetch(following, place);
        const u32 as = base + stage * STAGE, xs = as + BYTES_A, gs = xs + BYTES_X;
        const bool both = work % EACH + FIRST >= LAG;
        for (int turn = 0; turn < TURNS; turn++) {
            if (STAGGERED && turn == group % TURNS) fetch(following, place);
            const int chunk = group + turn * WN;
            if (CHUNKS_OF_16 % WN && chunk >= CHUNKS_OF_16) continue;
            u32 g[TO][4];
#pragma unroll
            for (int o = 0; o < TO; o++) {
                const int q = chunk * 16 + lane % 8 + lane / 16 * 8;
                matrices_transposed(g[o], gs + q * PITCH_G + (o * 16 + (lane / 8 & 1) * 8) * 2);
            }
            const int slot = slot_of<HALO, KW>(chunk * 16 + lane % 16) + ky * COLUMNS;
            if (both) accumulate<TI, PITCH_A>(acc, g, as + slot * PITCH_A);
            if (XB) accumulate<TX, PITCH_X>(acc_x, g, xs + slot * PITCH_X);
        }
        stage = (stage + 1) % STAGES;
    }
    copy_wait<0>();
    put_part(acc, (float*)memory, parts + (size_t)blockIdx.x * (KW * KW * CA * SO), CA, ci0);
    if (XB) put_part(acc_x, (float*)memory, parts_x + (size_t)blockIdx.x * (KW * KW * SI * SO), SI, x0);
}
