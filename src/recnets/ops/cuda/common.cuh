// What the CRC kernels share: tiles of pixels with their halo in shared memory, and a convolution from there.
//
// Shapes are compile-time constants, given by -D: H, W (map), D (steps), SI, SO (channels of a segment and of a state),
// IMAGES x ROWS x W (the tile: whole images, or rows of one image), NB (output channels a block), MT x NT (tiles of
// 16 pixels and of 8 channels a warp), WM x WN (warps), STACKED (a warp's tiles of 16 pixels lie below each other, else
// behind each other), SINGLE (one tile a block) or else PREFETCH (the next tile is fetched while one is convolved), FP16
// (else bfloat16); WIDE: convolutions by warpgroups, see planes.cuh.
//
// Maps are rows of channels: pixel p = (n*H + y)*W + x, channel c of step i at p*(D*S) + i*S + c. The pixels of a tile
// follow each other in memory. z and dz, which only these kernels read, are a map of SO channels for every step, so that what
// a step reads lies together: channel c of step i at (i*batch*H*W + p)*SO + c. With APART x and dx are so too, of SI.

#ifndef WIDE
#define WIDE 0
#endif
#ifndef APART
#define APART 0
#endif

constexpr int PIXELS = IMAGES * ROWS * W;           // of a tile
constexpr int TILES_A_MAP = (H + ROWS - 1) / ROWS;  // 1 where a tile is whole images

__host__ __device__ constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }
// Bytes from pixel to pixel in shared memory: an odd number of 16s, so that 8 neighbours lie in different banks.
__host__ __device__ constexpr int pitch_of(int channels) {
    return (round_up(channels, 8) / 8 + (round_up(channels, 8) / 8 + 1) % 2) * 16;
}
__host__ __device__ constexpr int slots_of(int halo) { return IMAGES * (ROWS + 2 * halo) * (W + 2 * halo); }

// A tile with its halo in shared memory: rows of channels, or, WIDE, planes of 8 channels, 16 bytes a slot. A plane has so
// many slots more that chunks of the same slot, and of the next where there are fewer than 8, lie in different banks.
__host__ __device__ constexpr int plane_of(int channels, int slots) {
    const int chunks = round_up(channels, 8) / 8, turn = chunks == 2 ? 4 : chunks == 4 ? 2 : chunks == 1 ? 0 : 1;
    return (slots + (8 + turn - slots % 8) % 8) * 16;
}
template <int CHANNELS, int HALO>
__host__ __device__ constexpr int bytes_of() {
    return WIDE ? round_up(CHANNELS, 8) / 8 * plane_of(CHANNELS, slots_of(HALO)) : slots_of(HALO) * pitch_of(CHANNELS);
}
// Where channel c, the first of 8 (or of 4), of a slot lies.
template <int CHANNELS, int HALO>
__device__ __forceinline__ u32 chunk_at(int slot, int c) {
    return WIDE ? c / 8 * plane_of(CHANNELS, slots_of(HALO)) + slot * 16 + c % 8 * 2 : slot * pitch_of(CHANNELS) + c * 2;
}

// A value that the compiler cannot compute ahead: what follows from it is worked out where it is needed, rather than
// held in registers for the whole kernel.
__device__ __forceinline__ int afresh(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

struct Tile {
    int image, row;  // first of each
    int first;       // first pixel
    int count;       // pixels that exist
};

__device__ __forceinline__ Tile tile_at(int t, int batch) {
    Tile tile;
    if (TILES_A_MAP == 1) {
        tile.image = t * IMAGES;
        tile.row = 0;
        tile.count = min(IMAGES, batch - tile.image) * H * W;
    } else {
        tile.image = t / TILES_A_MAP;
        tile.row = (t % TILES_A_MAP) * ROWS;
        tile.count = min(ROWS, H - tile.row) * W;
    }
    tile.first = (tile.image * H + tile.row) * W;
    return tile;
}
__device__ __forceinline__ int tiles_of(int batch) {
    return TILES_A_MAP == 1 ? (batch + IMAGES - 1) / IMAGES : batch * TILES_A_MAP;
}

// Where z_i and dz_i of a tile begin.
__device__ __forceinline__ size_t step_at(int i, const Tile& tile, int batch) {
    return ((size_t)i * batch * (H * W) + tile.first) * SO;
}

// Where x_i and dx_i of all pixels begin, and how far it is from pixel to pixel.
constexpr int X_STRIDE = APART ? SI : D * SI;
__device__ __forceinline__ size_t x_step(int i, int batch) { return APART ? (size_t)i * batch * (H * W) * SI : i * SI; }

// Where pixel q of the tile lies in a shared tile with a halo; with KERNEL, the corner of its window, tap (0, 0).
template <int HALO, int KERNEL = 1>
__device__ __forceinline__ int slot_of(int q) {
    q = q < PIXELS ? q : 0;
    const int image = q / (ROWS * W), row = q / W % ROWS, column = q % W, inset = HALO - KERNEL / 2;
    return (image * (ROWS + 2 * HALO) + row + inset) * (W + 2 * HALO) + column + inset;
}

// Pixel p of 16 of tile m of a warp. STACKED: of the same 16 columns, one row below that of tile m - 1; of maps that are
// 8 wide, 8 pixels of two strips of MT rows each.
// WIDE: of two rows of 8 of the patch of 8 x 8 that is tile m of a warpgroup.
__device__ __forceinline__ int pixel_at(int wm, int m, int p) {
    constexpr int ACROSS = W < 16 ? 1 : W / 16;
    if (WIDE) {
        const int patch = wm / 4 * MT + m, row = patch / (W / 8) * 8 + wm % 4 * 2 + p / 8;
        return row * W + patch % (W / 8) * 8 + p % 8;
    }
    if (!STACKED) return (wm * MT + m) * 16 + p;
    if (W == 8) return ((wm * 2 + p / 8) * MT + m) * 8 + p % 8;
    return (wm / ACROSS * MT + m) * W + wm % ACROSS * 16 + p;
}
static_assert(!STACKED || ((W == 8 || W % 16 == 0) && ROWS % MT == 0 && WM * MT * 16 == PIXELS), "whole stacks");

// The pixel of a slot of a shared tile, relative to the tile's first, and whether it lies in the map.
template <int HALO>
__device__ __forceinline__ bool pixel_of(int slot, const Tile& tile, int batch, int& pixel, bool& inside) {
    constexpr int COLUMNS = W + 2 * HALO, LINES = ROWS + 2 * HALO;
    const int image = slot / (LINES * COLUMNS), row = slot / COLUMNS % LINES - HALO, column = slot % COLUMNS - HALO;
    const int y = tile.row + row;
    inside = row >= 0 && row < ROWS;
    pixel = (image * ROWS + row) * W + column;
    return y >= 0 && y < H && column >= 0 && column < W && tile.image + image < batch;
}

// With SINGLE, a block owns one tile for all steps: its own channels of its own pixels stay in shared memory, and only
// foreign chunks of 8 channels come from other blocks: the rows of the halo, and the other blocks' channels.
constexpr int CHUNKS = SO / 8, OWN_CHUNKS = NB / 8, SPLITS = SO / NB;
// The thread's number, worked out afresh where dividing by CHUNKS is no shift: such places, held for all tiles, spill.
__device__ __forceinline__ int thread_number() { return CHUNKS & (CHUNKS - 1) ? afresh(threadIdx.x) : threadIdx.x; }
__host__ __device__ constexpr int foreign_rows(int halo) { return TILES_A_MAP > 1 ? 2 * halo * W * CHUNKS : 0; }
__host__ __device__ constexpr int foreign_of(int halo) { return foreign_rows(halo) + PIXELS * (CHUNKS - OWN_CHUNKS); }

// Foreign chunk e: its pixel relative to the tile's first, its slot and its first channel; false where it does not exist.
template <int HALO>
__device__ __forceinline__ bool foreign(int e, int channel, const Tile& tile, int& pixel, int& slot, int& c) {
    if (e < foreign_rows(HALO)) {
        const int line = e / CHUNKS / W, column = e / CHUNKS % W, row = line < HALO ? line - HALO : ROWS + line - HALO;
        c = e % CHUNKS * 8;
        pixel = row * W + column;
        slot = (row + HALO) * (W + 2 * HALO) + column + HALO;
        return tile.row + row >= 0 && tile.row + row < H;
    }
    if (SPLITS == 1) return false;
    constexpr int OTHERS = SPLITS > 1 ? CHUNKS - OWN_CHUNKS : 1;
    e -= foreign_rows(HALO);
    const int chunk = e % OTHERS;
    c = (chunk < channel / 8 ? chunk : chunk + OWN_CHUNKS) * 8;
    pixel = e / OTHERS;
    slot = slot_of<HALO>(pixel);
    return pixel < tile.count;
}
// Will other blocks read this block's channels of pixel q? Then they must be in global memory before the wait.
__device__ __forceinline__ bool shared_with_others(int q, int halo) {
    return SPLITS > 1 || (TILES_A_MAP > 1 && (q < halo * W || q >= (ROWS - halo) * W));
}

// What is fetched of a tile with its halo. WIDE: what can lie in the map, and the rest is cleared once for all; else every
// slot.
constexpr bool TALLER = TILES_A_MAP > 1;  // than itself, by a row above and below
template <int HALO>
__host__ __device__ constexpr int items_of() {
    return WIDE ? PIXELS + 2 * W * TALLER : slots_of(HALO);
}
template <int HALO>
__device__ __forceinline__ bool item(unsigned e, const Tile& tile, int batch, int& slot, int& pixel, bool& inside) {
    if (!WIDE) {
        slot = e;
        return pixel_of<HALO>(slot, tile, batch, pixel, inside);
    }
    const unsigned line = e / W, column = e % W, image = TALLER ? 0 : line / ROWS;
    slot = (line + (TALLER ? 0 : image * 2 + 1)) * (W + 2) + column + 1;
    pixel = (int)e - W * TALLER;
    inside = !TALLER || (line > 0 && line <= ROWS);
    return TALLER ? (unsigned)(tile.row + (int)line - 1) < H : pixel < tile.count;
}

// Copy a segment of CHANNELS of a tile, zeros outside the map.
template <int HALO, int CHANNELS>
__device__ __forceinline__ void copy_tile(u32 to, const u16* from, int stride, const Tile& tile, int batch) {
    constexpr int VECTOR = CHANNELS % 8 == 0 ? 8 : 4, CHUNKS = CHANNELS / VECTOR;
    for (int e = thread_number(); e < items_of<HALO>() * CHUNKS; e += THREADS) {
        const int chunk = e % CHUNKS;
        int slot, pixel;
        bool inside;
        const bool ok = item<HALO>(e / CHUNKS, tile, batch, slot, pixel, inside);
        const u16* source = ok ? from + (size_t)(tile.first + pixel) * stride + chunk * VECTOR : from;
        copy_async<VECTOR * 2>(to + chunk_at<CHANNELS, HALO>(slot, chunk * VECTOR), source, ok);
    }
}

// This block's channels of its own pixels, without a halo: byte `at` of pixel q. Where rows fill banks exactly, chunks
// of 16 bytes change places from row to row, so that neither products nor copies find 8 rows in the same bank.
constexpr int OWN_PITCH = NB == 16 || NB == 32 || NB == 64 ? NB * 2 : pitch_of(NB);
__device__ __forceinline__ u32 own_at(int q, int at) {
    if (NB == 64) return q * OWN_PITCH + (at ^ ((q & 7) << 4));
    if (NB == 32) return q * OWN_PITCH + (at ^ ((q >> 1 & 3) << 4));
    if (NB == 16) return q * OWN_PITCH + (at ^ ((q >> 2 & 1) << 4));
    return q * OWN_PITCH + at;
}
constexpr int OWN_LOADERS = THREADS / OWN_CHUNKS;  // threads keep to one chunk of 8 channels
constexpr int OWN_EACH = (PIXELS + OWN_LOADERS - 1) / OWN_LOADERS, OWN_BATCH = OWN_EACH < 4 ? OWN_EACH : 4;
// load(k, q, byte of the chunk) for a few of this thread's chunks, then use(k, q, byte): loads wait together, not each
// for the store before it.
template <class L, class F>
__device__ __forceinline__ void for_own(int count, L load, F use) {
    const int thread = thread_number(), loader = thread / OWN_CHUNKS, at = thread % OWN_CHUNKS * 16;
    if (loader >= OWN_LOADERS) return;
#pragma unroll
    for (int k0 = 0; k0 < OWN_EACH; k0 += OWN_BATCH) {
#pragma unroll
        for (int k = 0; k < OWN_BATCH; k++)
            if (loader + (k0 + k) * OWN_LOADERS < count) load(k, loader + (k0 + k) * OWN_LOADERS, at);
#pragma unroll
        for (int k = 0; k < OWN_BATCH; k++)
            if (loader + (k0 + k) * OWN_LOADERS < count) use(k, loader + (k0 + k) * OWN_LOADERS, at);
    }
}
__device__ __forceinline__ void fetch_own(u32 to, const u16* from, int stride, int count) {
    for_own(count, [](int, int, int) {}, [&](int, int q, int at) {
        copy_async<16>(to + own_at(q, at), (const char*)(from + (size_t)q * stride) + at, true);
    });
}
__device__ __forceinline__ void put_own(u16* to, u32 from, int stride, int count) {
    uint4 v[OWN_BATCH];
    for_own(count, [&](int k, int q, int at) { v[k] = load_shared(from + own_at(q, at)); },
            [&](int k, int q, int at) { *(uint4*)((char*)(to + (size_t)q * stride) + at) = v[k]; });
}

// What only later launches read. Between steps WIDE takes tiles in an order by which much is still in L2, without this.
__device__ __forceinline__ void put_away(u16* to, uint4 v) {
    if (WIDE) store_streaming(to, v);
    else *(uint4*)to = v;
}

// Copy BYTES (a multiple of 16) as they are.
__device__ __forceinline__ void copy_block(u32 to, const void* from, int bytes) {
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16) copy_async<16>(to + at, (const char*)from + at, true);
}

// ---- the convolution ------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int steps_of(int channels, int kernel) { return (kernel * kernel * round_up(channels, 8) + 15) / 16; }

// The same as `convolve` below for the tiles of a stack: a row of pixels is loaded once for the three taps above each
// other. from: this lane's address in the row above the first.
template <int CHANNELS, int COLUMNS, int PITCH, int PAIRS, int XPAIRS, bool MAIN, int TM, int TN, int TX>
__device__ __forceinline__ void convolve_stack(float (&acc)[TM][TN][4], float (&extra)[TM][TX][4], u32 from, u32 weights,
                                               u32 extra_weights, int first_extra) {
#pragma unroll
    for (int dx = 0; dx < 3; dx++)
#pragma unroll
        for (int chunk = 0; chunk < CHANNELS / 16; chunk++) {
            uint4 b[3][(TN + 1) / 2];
            uint2 e[3][TX];
#pragma unroll
            for (int dy = 0; dy < 3; dy++) {
                const int j = (dy * 3 + dx) * (CHANNELS / 16) + chunk;
#pragma unroll
                for (int n = 0; MAIN && n < (TN + 1) / 2; n++) b[dy][n] = load_shared(weights + (j * PAIRS + n) * 512);
#pragma unroll
                for (int n = 0; XPAIRS && n < TX; n++)
                    e[dy][n] = load_shared2(extra_weights + (j * XPAIRS + (first_extra + n) / 2) * 512 + (first_extra + n) % 2 * 8);
            }
#pragma unroll
            for (int r = 0; r < TM + 2; r++) {
                u32 a[4];
                matrices(a, from + (r * COLUMNS + dx) * PITCH + chunk * 32);
#pragma unroll
                for (int dy = 0; dy < 3; dy++) {
                    const int m = r < dy || r - dy >= TM ? 0 : r - dy;
                    if (r < dy || r - dy >= TM) continue;
#pragma unroll
                    for (int n = 0; MAIN && n < TN; n++) {
                        const uint4 w = b[dy][n / 2];
                        product(acc[m][n], a, n % 2 ? w.z : w.x, n % 2 ? w.w : w.y);
                    }
#pragma unroll
                    for (int n = 0; XPAIRS && n < TX; n++) product(extra[m][n], a, e[dy][n].x, e[dy][n].y);
                }
            }
        }
}

// acc += a KERNEL x KERNEL convolution of a shared tile of COLUMNS. The product runs over (tap, channel), 16 at a time.
// corners: each lane's address of pixel lane % 16 of each of the warp's tiles; weights: this lane's address of the
// warp's first packed fragment (see pack.cuh), of which a step of 16 holds PAIRS, 16 output channels each. A second
// convolution of the same tile, extra, may come along: TX tiles of 8 channels from number first_extra on, of 16 * XPAIRS.
template <int CHANNELS, int KERNEL, int COLUMNS, int PITCH, int PAIRS, int XPAIRS, bool MAIN, int TM, int TN, int TX>
__device__ __forceinline__ void convolve(float (&acc)[TM][TN][4], float (&extra)[TM][TX][4], const u32 (&corners)[TM],
                                         u32 weights, u32 extra_weights, int first_extra) {
    constexpr int PADDED = round_up(CHANNELS, 8), TAPS = KERNEL * KERNEL;
    // The upper lanes address the second 8 of 16 channels: 16 bytes further on, or where that is the next tap.
    const bool upper = threadIdx.x & 16, near = PADDED % 16 == 0;
    u32 from[TM];  // opaque, so that what is added to it is part of the load and not a sum of its own
#pragma unroll
    for (int m = 0; m < TM; m++) from[m] = afresh(corners[m] + (near && upper ? 16 : 0));
    if (STACKED && KERNEL == 3 && near) {
        convolve_stack<PADDED, COLUMNS, PITCH, PAIRS, XPAIRS, MAIN>(acc, extra, from[0], weights, extra_weights, first_extra);
        return;
    }
#pragma unroll
    for (int j = 0; j < steps_of(CHANNELS, KERNEL); j++) {
        const int k0 = 16 * j, k1 = 16 * j + 8 < TAPS * PADDED ? 16 * j + 8 : 0;
        const int t0 = k0 / PADDED, t1 = k1 / PADDED;
        const u32 o0 = ((t0 / KERNEL) * COLUMNS + t0 % KERNEL) * PITCH + k0 % PADDED * 2;
        const u32 o1 = ((t1 / KERNEL) * COLUMNS + t1 % KERNEL) * PITCH + k1 % PADDED * 2;
        const u32 offset = upper && !near ? o1 : o0;
        u32 b[(TN + 1) / 2][4];
        uint2 e[TX];
#pragma unroll
        for (int n = 0; MAIN && n < (TN + 1) / 2; n++) {
            const uint4 v = load_shared(weights + (j * PAIRS + n) * 512);
            b[n][0] = v.x, b[n][1] = v.y, b[n][2] = v.z, b[n][3] = v.w;
        }
#pragma unroll
        for (int n = 0; XPAIRS && n < TX; n++)
            e[n] = load_shared2(extra_weights + (j * XPAIRS + (first_extra + n) / 2) * 512 + (first_extra + n) % 2 * 8);
#pragma unroll
        for (int m = 0; m < TM; m++) {
            u32 a[4];
            matrices(a, from[m] + offset);
#pragma unroll
            for (int n = 0; MAIN && n < TN; n++) product(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; XPAIRS && n < TX; n++) product(extra[m][n], a, e[n].x, e[n].y);
        }
    }
}
template <int CHANNELS, int KERNEL, int COLUMNS, int PITCH, int PAIRS, int TM, int TN>
__device__ __forceinline__ void convolve(float (&acc)[TM][TN][4], const u32 (&corners)[TM], u32 weights) {
    float none[TM][1][4];
    convolve<CHANNELS, KERNEL, COLUMNS, PITCH, PAIRS, 0, true>(acc, none, corners, weights, 0, 0);
}

// ---- sums over the batch, and the wait for all blocks ---------------------------------------------------------------

// Sums are kept in COPIES, so that blocks do not all add to the same words.
constexpr int COPIES = 4;

__device__ __forceinline__ float total(const float* sums, int which, int step, int c) {
    float v = 0;
#pragma unroll
    for (int r = 0; r < COPIES; r++) v += load_fresh(sums + ((r * 2 + which) * D + step) * SO + c);
    return v;
}

// Both sums of all steps, once all blocks have added theirs.
__device__ __forceinline__ void put_totals(float* totals, const float* sums) {
    for (int e = blockIdx.x * THREADS + threadIdx.x; e < 2 * D * SO; e += gridDim.x * THREADS)
        totals[e] = total(sums, e / (D * SO), e / SO % D, e % SO);
}

// Add a warp's column sums (two a thread and tile of 8 channels, over the rows of its lanes) to the step's totals.
// scratch: WM x 2 x NB floats.
__device__ __forceinline__ void add_sums(const float (&first)[NT][2], const float (&second)[NT][2], float* scratch,
                                         float* sums, int step, int channel) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    constexpr int COUNT = 4 * NT;
    float v[COUNT];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) v[2 * n + j] = first[n][j], v[2 * (NT + n) + j] = second[n][j];
    // Eight lanes hold rows of the same columns: each exchange halves the values that a lane goes on with.
#pragma unroll
    for (int turn = 1; turn <= 3; turn++)
#pragma unroll
        for (int k = 0; k < COUNT / 2; k++) {
            const int half = COUNT >> turn, bit = 32 >> turn;
            if (k >= half) continue;
            const bool upper = lane & bit;
            const float other = __shfl_xor_sync(~0u, upper ? v[k] : v[k + half], bit);
            v[k] = (upper ? v[k + half] : v[k]) + other;
        }
#pragma unroll
    for (int k = 0; k < COUNT / 8; k++) {
        const int at = k + (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * (COUNT / 8), which = at / (2 * NT);
        scratch[(wm * 2 + which) * NB + (wn * NT + at / 2 % NT) * 8 + lane % 4 * 2 + at % 2] = v[k];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 2 * NB; e += THREADS) {
        float total = 0;
#pragma unroll
        for (int m = 0; m < WM; m++) total += scratch[m * 2 * NB + e];
        const int copy = blockIdx.x / SPLITS % COPIES;
        atomicAdd(sums + ((copy * 2 + e / NB) * D + step) * SO + channel + e % NB, total);
    }
}
