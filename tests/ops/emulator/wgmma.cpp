// Products of warpgroups, which read shared memory at some moment between their start and the wait for them. Until then
// their sums are not numbers. Each warp has its own 16 rows, and all warps of a warpgroup must start the same products.
// Copies and stores must have been published by the thread that made them.

#include "device.h"

namespace emulator {

using u64 = unsigned long long;

// Element k of row, or column, r of a factor.
float element(Block& block, u64 matrix, int r, int k, const Product& product) {
    const unsigned start = (matrix & 0x3fff) << 4, next_k = (matrix >> 16 & 0x3fff) << 4;
    const unsigned next_mn = (matrix >> 32 & 0x3fff) << 4;
    const unsigned at = start + r / 8 * next_mn + k / 8 * next_k + (product.by_k ? r % 8 : k % 8) * 16;
    const unsigned char* unit = of_block(block, at, 16);
    if (block.hidden[(at - SHARED_BASE) / 16])
        fail("wgmma reads byte %u of shared memory, which was not published since it was written", at - SHARED_BASE);
    return from_half(((const unsigned short*)unit)[product.by_k ? k % 8 : r % 8], product.fp16);
}

void perform(Warp& warp, const Product& product) {
    Block& block = *warp.lanes->block;
    const int first = warp.lanes->index / 32 % 4 * 16, n = product.n;
    static float a[16][16], b[16][256];
    for (int k = 0; k < 16; k++) {
        for (int r = 0; r < 16; r++) a[k][r] = element(block, product.a, first + r, k, product);
        for (int c = 0; c < n; c++) b[k][c] = element(block, product.b, c, k, product);
    }
    for (int m = 0; m < 16; m++) {
        float sums[256] = {};
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < n; c++) sums[c] += a[k][m] * b[k][c];
        for (int c = 0; c < n; c++) {
            const int lane = m % 8 * 4 + c % 8 / 2;
            warp.sums[product.sums].values[lane][c / 8 * 4 + m / 8 * 2 + c % 2] += sums[c];
        }
    }
}
void perform_all(Warp& warp) {
    for (; warp.performed < warp.products.size(); warp.performed++) perform(warp, warp.products[warp.performed]);
}

// The sums that these are, taken from the threads until the wait.
unsigned sums_of(Warp& warp, const Wgmma* const* in) {
    const int count = in[0]->n / 2;
    for (unsigned s = 0; s < warp.sums.size(); s++) {
        const long apart = in[0]->sums - warp.sums[s].at[0];
        if (apart == 0 && warp.sums[s].count == count) return s;
        if (apart > -count && apart < warp.sums[s].count) fail("wgmma with some of another's sums");
    }
    WarpSums sums = {count};
    for (int lane = 0; lane < 32; lane++) {
        sums.at[lane] = in[lane]->sums;
        sums.values[lane].assign(in[lane]->sums, in[lane]->sums + count);
        for (int e = 0; e < count; e++) in[lane]->sums[e] = __builtin_nanf("");
    }
    warp.sums.push_back(sums);
    return warp.sums.size() - 1;
}

void start(const Wgmma* const* in, int* const*) {
    Warp& warp = *self->warp;
    const unsigned number = warp.lanes->index / 32;
    if ((number / 4 + 1) * 128 > shape.threads) fail("wgmma by a warp without a warpgroup");
    if (!warp.fenced) fail("wgmma without wgmma_fence");
    for (int lane = 1; lane < 32; lane++)
        if (in[lane]->a != in[0]->a || in[lane]->b != in[0]->b) fail("wgmma with other factors than another lane");
    std::vector<Factors>& all = (&warp - number % 4)->started;  // by the warpgroup
    const Factors own = {in[0]->a, in[0]->b, in[0]->n, in[0]->by_k};
    if (warp.count == all.size()) all.push_back(own);
    if (memcmp(&all[warp.count], &own, sizeof own)) fail("wgmma with other factors than another warp of the warpgroup");
    warp.count++;
    warp.products.push_back({in[0]->a, in[0]->b, in[0]->n, in[0]->fp16, in[0]->by_k, sums_of(warp, in)});
    if (chance(2)) perform_all(warp);
}
void wgmma(const Wgmma& own) {
    pause();
    int none;
    together<Wgmma, int>("wgmma", own, none, start);
}
void by_warp(const char* what, void (*all)(const int* const*, int* const*)) {
    int none = 0;
    together<int, int>(what, none, none, all);
}
void wgmma_fence() {
    by_warp("wgmma_fence", [](const int* const*, int* const*) { self->warp->fenced = true; });
}
void wgmma_commit() {
    by_warp("wgmma_commit", [](const int* const*, int* const*) {
        self->warp->committed = self->warp->products.size();
    });
}
// What was not committed is not waited for.
void wgmma_wait() {
    pause();
    by_warp("wgmma_wait", [](const int* const*, int* const*) {
        Warp& warp = *self->warp;
        if (warp.committed < warp.products.size()) return;
        perform_all(warp);
        for (const WarpSums& sums : warp.sums)
            for (int lane = 0; lane < 32; lane++) memcpy(sums.at[lane], sums.values[lane].data(), sums.count * 4);
        warp.sums.clear(), warp.products.clear();
        warp.performed = warp.committed = 0;
        warp.fenced = false;
    });
}

// ---- what products see of shared memory -----------------------------------------------------------------------------

void hide(unsigned address) { self->block->hidden[(address - SHARED_BASE) / 16] = self->index + 1; }
void stored(unsigned to) {
    hide(to);
    self->landed.push_back(to);
}
void publish_shared() {
    for (const unsigned at : self->landed) {
        unsigned short& by = self->block->hidden[(at - SHARED_BASE) / 16];
        if (by == self->index + 1) by = 0;
    }
    self->landed.clear();
}

void check_warpgroups(const std::vector<Warp>& warps) {
    for (size_t w = 0; w < warps.size(); w++)
        if (warps[w].count != warps[w - warps[w].lanes->index / 32 % 4].started.size())
            fail("wgmma by some warps of a warpgroup only");
}

}  // namespace emulator
