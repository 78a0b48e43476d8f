// Inference of a whole Recurrent module: h_i = ReLU(s_i*(x_i * W_x + h_{i-1} * W_h) + t_i) with the running statistics
// folded into s_i and t_i, y = sum of h_i A_i, out = ReLU(s*y + t), and its 2x2 maxima with POOL. No h_i leaves the chip.
//
// A cluster of blocks takes IMAGES images through all steps, then the next ones. A block has ROWS rows of the map and NB
// of the SO channels of h and of the C_OUT channels of y: both kernels and h_{i-1} of its rows, with their halo and all
// SO channels, are in its shared memory, y is in registers. What a block computes of h_i, it also writes to the blocks
// that need it: those of the same rows, and those above and below for the halo. One wait for the cluster a step.
//
// How blocks wait for each other: stores into another block's tile count their bytes there, and a block waits until its
// own warps have arrived and all bytes are there. A block that has received h_i from another knows that the warps which
// sent it have read h_{i-1}: all those that read what it will overwrite. (The barrier of the cluster would need a fence
// of the whole GPU's memory.)
//
// Beyond common.cuh: BUFFERS of h and of x. Two: h_i goes where h_{i-2} was, which all blocks have read before the
// last wait, and the part of x of the next step is computed during the wait. One: a second wait a step, before h_{i-1}
// is overwritten; the part of x is computed during that. C_OUT; TMT x TNT tiles of 16 pixels and of 8 channels of y a
// warp, TWM x TWN warps.

constexpr int COLUMNS = W + 1;  // the zero between two rows is the right border of one and the left border of the next
constexpr int LINES = IMAGES * (ROWS + 1) + 1;  // likewise the line between two images
constexpr int SLOTS = LINES * COLUMNS + 1;
constexpr int RS = TILES_A_MAP, NS = SO / NB, CLUSTER = RS * NS;
constexpr int PITCH_X = pitch_of(SI), PITCH_H = pitch_of(SO), PAIRS = NB / 16;
constexpr int LINE_H = COLUMNS * PITCH_H;
constexpr int BYTES_WX = steps_of(SI, KX) * NB * 32, BYTES_WH = steps_of(SO, KH) * NB * 32;
constexpr int BYTES_X = SLOTS * PITCH_X, BYTES_H = SLOTS * PITCH_H;
constexpr int COLUMN_BYTES = TNT * 256;                      // 16 x (8 * TNT) of A_i: what a warp reads for 16 channels
constexpr int BYTES_A = SO / 16 * TWN * COLUMN_BYTES;        // of A_i, this block's channels of y
constexpr int OUTPUTS = TWN * TNT * 8;                       // of y, a block

static_assert(RS == 1 || IMAGES == 1, "rows of one image, or whole images");
static_assert(ROWS % MT == 0 && ROWS % TMT == 0, "a warp's rows are rows of the tile");
static_assert(SO % NB == 0 && NB % 16 == 0 && NB == WN * NT * 8 && SI % 4 == 0 && C_OUT % 4 == 0, "channels");
static_assert(OUTPUTS * NS >= C_OUT && TWM * TWN <= WM * WN, "all of y");
static_assert(!POOL || TMT % 2 == 0, "a warp pools its own rows");

// ---- places ---------------------------------------------------------------------------------------------------------

// A warp's part of a map is 16 pixels wide and TM rows high, so that a row that it loads serves three taps: 16 columns,
// or, of narrow maps, 8 columns of two strips of TM rows.
template <int TM>
struct Place {
    static constexpr int ACROSS = (W + 15) / 16, STRIPS = ROWS / TM;  // STRIPS an image
    static constexpr int UNITS = W > 8 ? IMAGES * STRIPS * ACROSS : (IMAGES * STRIPS + 1) / 2;
    static constexpr bool FULL = W > 8 ? W % 16 == 0 : W == 8 && IMAGES * STRIPS % 2 == 0;
    int image, row, column;  // of the first of its TM pixels
    bool exists;

    // Pixel p of 16 of a warp's part.
    __device__ __forceinline__ Place(int unit, int p) {
        const int strip = W > 8 ? unit / ACROSS : unit * 2 + p / 8;
        column = W > 8 ? unit % ACROSS * 16 + p : p % 8;
        image = strip / STRIPS;
        row = strip % STRIPS * TM;
        exists = FULL || (column < W && image < IMAGES);
        if (!exists) image = row = column = 0;  // an address that can be read
    }
    __device__ __forceinline__ int slot() const { return (image * (ROWS + 1) + row + 1) * COLUMNS + column + 1; }
};
static_assert(Place<MT>::UNITS == WM && Place<TMT>::UNITS == TWM, "all pixels");

// x_i of the tile and, where other blocks have the rows above and below, of its halo.
__device__ __forceinline__ void load_x(u32 to, const u16* x, int i, int image0, int row0, int batch) {
    constexpr int VECTOR = SI % 8 == 0 ? 8 : 4, PARTS = SI / VECTOR;
    constexpr int HALO = RS > 1 && KX > 1, READ = ROWS + 2 * HALO;
    for (int e = afresh(threadIdx.x); e < IMAGES * READ * W * PARTS; e += THREADS) {
        const int part = e % PARTS, column = e / PARTS % W, row = e / PARTS / W % READ - HALO, image = e / PARTS / W / READ;
        const int y = row0 + row, n = image0 + image;
        if (y < 0 || y >= H || n >= batch) continue;  // zeros outside the map; pictures that do not exist are not put out
        const int slot = (image * (ROWS + 1) + row + 1) * COLUMNS + column + 1;
        copy_async<VECTOR * 2>(to + slot * PITCH_X + part * VECTOR * 2,
                               x + ((size_t)(n * H + y) * W + column) * (D * SI) + i * SI + part * VECTOR, true);
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

// The fragments of a warp's NT tiles of 8 output channels for 16 of (tap, channel), number j.
__device__ __forceinline__ void load_weights(u32 (&b)[NT][2], u32 weights, int j, int wn, int lane) {
    if (NT % 2 == 0) {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            const uint4 v = load_shared(weights + (j * PAIRS + wn * (NT / 2) + n) * 512 + lane * 16);
            b[2 * n][0] = v.x, b[2 * n][1] = v.y;
            if (2 * n + 1 < NT) b[2 * n + 1][0] = v.z, b[2 * n + 1][1] = v.w;
        }
    } else {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int tile = wn * NT + n;
            const uint2 v = load_shared2(weights + (j * PAIRS + tile / 2) * 512 + lane * 16 + tile % 2 * 8);
            b[n][0] = v.x, b[n][1] = v.y;
        }
    }
}

// A warp of few accumulators would wait for its own products: taps above each other add up apart, SETS in all.
constexpr int SETS = MT * NT <= 4 ? 3 : 1;

// acc += a convolution; `from` is this lane's address of the warp's first pixel, row 0.
template <int CHANNELS, int KERNEL, int PITCH>
__device__ __forceinline__ void convolve(float (&acc)[MT][NT][4], u32 from, u32 weights, int wn, int lane) {
    float more[SETS > 1 ? 2 : 1][MT][NT][4] = {};
    constexpr int LINE = COLUMNS * PITCH, PADDED = round_up(CHANNELS, 8), TAPS = KERNEL * KERNEL;
    if (PADDED % 16 == 0 && KERNEL == 3) {  // a row of pixels is loaded once for the three taps above each other
        const u32 corner = from - LINE - PITCH + (lane & 16);
#pragma unroll
        for (int dx = 0; dx < 3; dx++)
#pragma unroll
            for (int chunk = 0; chunk < PADDED / 16; chunk++) {
                u32 b[3][NT][2];
#pragma unroll
                for (int dy = 0; dy < 3; dy++) load_weights(b[dy], weights, (dy * 3 + dx) * (PADDED / 16) + chunk, wn, lane);
#pragma unroll
                for (int r = 0; r < MT + 2; r++) {
                    u32 a[4];
                    matrices(a, corner + r * LINE + dx * PITCH + chunk * 32);
#pragma unroll
                    for (int dy = 0; dy < 3; dy++) {
                        if (r < dy || r - dy >= MT) continue;
                        const int m = r < dy || r - dy >= MT ? 0 : r - dy;
#pragma unroll
                        for (int n = 0; n < NT; n++)
                            product(SETS > 1 && dy ? more[SETS > 1 && dy ? dy - 1 : 0][m][n] : acc[m][n], a, b[dy][n][0], b[dy][n][1]);
                    }
                }
            }
    } else {  // 16 of (tap, channel) may lie in two taps; what only fills up has weights of zero
        const u32 corner = from - KERNEL / 2 * (LINE + PITCH);
#pragma unroll
        for (int j = 0; j < steps_of(CHANNELS, KERNEL); j++) {
            const int k0 = 16 * j, k1 = 16 * j + 8 < TAPS * PADDED ? 16 * j + 8 : 0, t0 = k0 / PADDED, t1 = k1 / PADDED;
            const u32 o0 = t0 / KERNEL * LINE + t0 % KERNEL * PITCH + k0 % PADDED * 2;
            const u32 o1 = t1 / KERNEL * LINE + t1 % KERNEL * PITCH + k1 % PADDED * 2;
            const u32 at = corner + (lane & 16 ? o1 : o0);
            u32 b[NT][2];
            load_weights(b, weights, j, wn, lane);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                u32 a[4];
                matrices(a, at + m * LINE);
#pragma unroll
                for (int n = 0; n < NT; n++)
                    product(SETS > 1 && j % 3 ? more[SETS > 1 && j % 3 ? j % 3 - 1 : 0][m][n] : acc[m][n], a, b[n][0], b[n][1]);
            }
        }
    }
    if (SETS > 1)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) acc[m][n][k] += more[0][m][n][k] + more[SETS > 1 ? 1 : 0][m][n][k];
}

// y += h_i A_i; `from` is this lane's address of the warp's first pixel of h, `columns` that of its columns of A_i.
__device__ __forceinline__ void transition(float (&y)[TMT][TNT][4], u32 from, u32 columns, int lane) {
    constexpr int UNROLLED = TMT * TNT + MT * NT > 36 ? 1 : SO / 16;  // many accumulators leave no registers to load ahead
#pragma unroll(UNROLLED)
    for (int k = 0; k < SO / 16; k++) {
        u32 a[TMT][4];
        const u32 b = columns + k * TWN * COLUMN_BYTES;
#pragma unroll
        for (int m = 0; m < TMT; m++) matrices(a[m], from + (lane & 16) + m * LINE_H + k * 32);
#pragma unroll
        for (int n = 0; n + 1 < TNT; n += 2) {
            const uint4 v = load_shared(b + n * 256 + lane * 16);
#pragma unroll
            for (int m = 0; m < TMT; m++) {
                product(y[m][n], a[m], v.x, v.y);
                product(y[m][n + 1 < TNT ? n + 1 : 0], a[m], v.z, v.w);
            }
        }
        if (TNT % 2) {
            const uint2 v = load_shared2(b + (TNT - 1) * 256 + lane * 8);
#pragma unroll
            for (int m = 0; m < TMT; m++) product(y[m][TNT - 1], a[m], v.x, v.y);
        }
    }
}

// Four lanes have four words each, of 8 channels two: lane q gets word q of all, in the order of their channels.
__device__ __forceinline__ uint4 gather(u32 w0, u32 w1, u32 w2, u32 w3, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    u32 got = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
    if (odd) w0 = got;
    else w1 = got;
    got = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
    if (odd) w2 = got;
    else w3 = got;
    got = __shfl_xor_sync(~0u, upper ? w0 : w2, 2);
    if (upper) w0 = got;
    else w2 = got;
    got = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
    if (upper) w1 = got;
    else w3 = got;
    return make_uint4(w0, w1, w2, w3);
}
// After that, lane q has pixel lane / 4 + 8 * (q / 2) of 16, of tile q % 2 of two.
__device__ __forceinline__ int pixel_kept(int lane) { return lane / 4 + (lane & 2) * 4; }

// ReLU(z*s + t) of a tile's first or second 8 rows; f: s of two channels, then t.
__device__ __forceinline__ u32 sigma(const float (&z)[4], int half, float4 f) {
    return pack2(relu(z[half * 2] * f.x + f.z), relu(z[half * 2 + 1] * f.y + f.w));
}

// h_i of a warp into this block's tile and those of the others; `to` is this lane's address of its first pixel and of
// the warp's first channel.
__device__ __forceinline__ void put_h(const float (&acc)[MT][NT][4], const float4 (&affine)[NT], u32 to, u32 barrier,
                                      const Place<MT>& place, int row_rank, int split, int lane) {
    constexpr int TILES = MT * NT;
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        const int u = t + 1 < TILES ? t + 1 : t;
        const int m0 = t / NT, n0 = t % NT, m1 = u / NT, n1 = u % NT;
        const uint4 v = gather(sigma(acc[m0][n0], 0, affine[n0]), sigma(acc[m1][n1], 0, affine[n1]),
                               sigma(acc[m0][n0], 1, affine[n0]), sigma(acc[m1][n1], 1, affine[n1]), lane);
        const bool odd = lane & 1;
        const int row = place.row + (odd ? m1 : m0);
        const u32 at = to + (odd ? m1 * LINE_H + n1 * 16 : m0 * LINE_H + n0 * 16);
        if (!place.exists || (H % ROWS && row_rank * ROWS + row >= H) || (odd && t + 1 >= TILES)) continue;
        store_shared(at, v);
#pragma unroll
        for (int r = 1; r < NS; r++) store_cluster(at, barrier, row_rank * NS + (split + r) % NS, v);
        if (RS > 1 && KH > 1) {
            if (row == 0 && row_rank > 0)
#pragma unroll
                for (int r = 0; r < NS; r++) store_cluster(at + ROWS * LINE_H, barrier, (row_rank - 1) * NS + r, v);
            if (row == ROWS - 1 && row_rank + 1 < RS)
#pragma unroll
                for (int r = 0; r < NS; r++) store_cluster(at - ROWS * LINE_H, barrier, (row_rank + 1) * NS + r, v);
        }
    }
}

// ReLU(s*y + t) of a warp into global memory, with POOL its 2x2 maxima. channel: the warp's first of y.
__device__ __forceinline__ void put_y(const float (&y)[TMT][TNT][4], const float4* affine, u16* out,
                                      int unit, int image0, int row0, int channel, int batch, int lane) {
    constexpr int STEP = POOL ? 2 : 1, TILES = TMT / STEP * TNT, HEIGHT = H / STEP, WIDTH = W / STEP;
    const Place<TMT> place(afresh(unit), pixel_kept(lane));
    const int image = image0 + place.image;
    const bool mine = place.exists && image < batch && place.column / STEP < WIDTH && !(POOL && lane & 4);
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        u32 w[2][2];
        const int u = t + 1 < TILES ? t + 1 : t;
        const int m0 = t / TNT * STEP, n0 = t % TNT, m1 = u / TNT * STEP, n1 = u % TNT;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const int m = s ? m1 : m0, n = s ? n1 : n0, c = channel + n * 8 + lane % 4 * 2;
            const float4 f = load_constant(affine + (c < C_OUT ? c / 2 : 0));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[2] = {y[m][n][half * 2] * f.x + f.z, y[m][n][half * 2 + 1] * f.y + f.w};
                if (POOL) {
                    const int below = POOL ? m + 1 : m;  // of the same warp
                    v[0] = larger(v[0], y[below][n][half * 2] * f.x + f.z);
                    v[1] = larger(v[1], y[below][n][half * 2 + 1] * f.y + f.w);
#pragma unroll
                    for (int j = 0; j < 2; j++) v[j] = larger(v[j], __shfl_xor_sync(~0u, v[j], 4));  // the next column
                }
                w[s][half] = pack2(relu(v[0]), relu(v[1]));
            }
        }
        const uint4 v = gather(w[0][0], w[1][0], w[0][1], w[1][1], lane);
        const bool odd = lane & 1;
        const int c = channel + (odd ? n1 : n0) * 8, row = (row0 + place.row + (odd ? m1 : m0)) / STEP;
        if (!mine || row >= HEIGHT || c >= C_OUT || (odd && t + 1 >= TILES)) continue;
        u16* to = out + ((size_t)(image * HEIGHT + row) * WIDTH + place.column / STEP) * C_OUT + c;
        if (C_OUT % 8 == 0) *(uint4*)to = v;
        else {
            *(uint2*)to = make_uint2(v.x, v.y);
            if (c + 4 < C_OUT) *(uint2*)(to + 4) = make_uint2(v.z, v.w);
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Step i of the images of a group; the steps of a cluster follow each other through all of its groups.
struct Step {
    int group, i;
    __device__ __forceinline__ Step after(int count, int clusters) const {
        Step step = {group, i + count};
        for (int k = 0; k < count; k++)  // with D = 1 every step is another group
            if (step.i >= D) step.i -= D, step.group += clusters;
        return step;
    }
};

// steps: (D, SO / 2) of s, s, t, t of two channels; last: (C_OUT / 2) likewise. See prepare.cu for the packed kernels.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
inference(const u16* x, const u16* packed_x, const u16* packed_h, const u16* packed_a, const float4* steps,
          const float4* last, u16* out, int batch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 wx = shared_address(memory), wh = wx + BYTES_WX, as = wh + BYTES_WH, xs = as + BYTES_A;
    const u32 hs = xs + BUFFERS * BYTES_X, barriers = hs + BUFFERS * BYTES_H;  // two of 8 bytes, for even and odd steps
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    const int twm = warp / TWN, twn = warp % TWN;
    const int rank = cluster_rank(), row_rank = rank / NS, split = rank % NS, row0 = row_rank * ROWS;
    const int clusters = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER, groups = (batch + IMAGES - 1) / IMAGES;
    const int total = first < groups ? (groups - first + clusters - 1) / clusters * D : 0;  // the same for the cluster

    const Place<MT> read(wm, lane % 16), kept(wm, pixel_kept(lane));
    const Place<TMT> read_y(twm, lane % 16);
    const u32 from_x = read.slot() * PITCH_X, from_h = read.slot() * PITCH_H, from_y = read_y.slot() * PITCH_H;
    const int my_channel = split * NB + wn * NT * 8;
    const u32 to_h = kept.slot() * PITCH_H + my_channel * 2;

    if (threadIdx.x == 0) {
        barrier_init(barriers, THREADS);
        barrier_init(barriers + 8, THREADS);
        barrier_publish();
    }
    // What other blocks write here in a step: the other channels of these rows, and the halo.
    const int incoming = IMAGES * min(ROWS, H - row0) * W * (SO - NB) * 2 +
                         (RS > 1 && KH > 1 ? ((row_rank > 0) + (row_rank + 1 < RS)) * W * SO * 2 : 0);
    clear_shared(xs, BUFFERS * (BYTES_X + BYTES_H));  // what only fills up, and the border of the map
    __syncthreads();
    copy_block(wx, packed_x + (size_t)split * (BYTES_WX / 2), BYTES_WX);
    copy_block(wh, packed_h + (size_t)split * (BYTES_WH / 2), BYTES_WH);
    Step now = {first, 0};
    for (int b = 0; b < BUFFERS; b++) {
        const Step step = now.after(b, clusters);
        if (b < total) load_x(xs + b * BYTES_X, x, step.i, step.group * IMAGES, row0, batch);
    }
    copy_commit();
    copy_wait<0>();
    cluster_arrive();  // no block may write into one that has not cleared its tile
    cluster_wait();

    float acc[MT][NT][4] = {}, y[TMT][TNT][4] = {};
    if (BUFFERS == 2 && total) convolve<SI, KX, PITCH_X>(acc, xs + from_x, wx, wn, lane);
    for (int g = 0;; g++) {
        const u32 h_old = hs + (BUFFERS == 2 ? (g + 1) % 2 * BYTES_H : 0), h_new = hs + (BUFFERS == 2 ? g % 2 * BYTES_H : 0);
        if (now.i > 0) convolve<SO, KH, PITCH_H>(acc, h_old + from_h, wh, wn, lane);
        copy_wait<0>();
        __syncthreads();  // A_{i-1}, and x_{i+1} of two buffers or x_i of one, are there for all
        if (g > 0 && twm < TWM) {
            transition(y, h_old + from_y, as + twn * COLUMN_BYTES, lane);
            if (now.i == 0) {  // that was the last step of a group
                put_y(y, last, out, twm, (now.group - clusters) * IMAGES, row0, split * OUTPUTS + twn * TNT * 8, batch, lane);
#pragma unroll
                for (int m = 0; m < TMT; m++)
#pragma unroll
                    for (int n = 0; n < TNT; n++)
#pragma unroll
                        for (int k = 0; k < 4; k++) y[m][n][k] = 0;
            }
        }
        if (g == total) break;
        float4 affine[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) affine[n] = load_constant(steps + (now.i * SO + my_channel + n * 8) / 2 + lane % 4);
        if (BUFFERS == 1) {
            // This thread has read h_{i-1}: what it loaded is in its sums.
            cluster_arrive_relaxed();
            convolve<SI, KX, PITCH_X>(acc, xs + from_x, wx, wn, lane);
            cluster_wait();
        }
        put_h(acc, affine, h_new + to_h, barriers + g % 2 * 8, kept, row_rank, split, lane);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) acc[m][n][k] = 0;
        // h_i is written, h_{i-1} and A_{i-1} read.
        if (threadIdx.x == 0) barrier_arrive_expect(barriers + g % 2 * 8, incoming);
        else barrier_arrive(barriers + g % 2 * 8);
        if (BUFFERS == 2 && g + 1 < total) convolve<SI, KX, PITCH_X>(acc, xs + (g + 1) % 2 * BYTES_X + from_x, wx, wn, lane);
        barrier_wait(barriers + g % 2 * 8, g / 2 % 2);
        // x_i was read before this thread's neighbours arrived.
        if (g + BUFFERS < total) {
            const Step step = now.after(BUFFERS, clusters);
            load_x(xs + (BUFFERS == 2 ? g % 2 * BYTES_X : 0), x, step.i, step.group * IMAGES, row0, batch);
        }
        copy_block(as, packed_a + (size_t)(split * D + now.i) * (BYTES_A / 2), BYTES_A);
        copy_commit();
        now = now.after(1, clusters);
    }
}
