// Half precision and tensor cores.

#include "emulator.h"

namespace emulator {

float from_half(unsigned short v, bool fp16) {
    if (!fp16) return __uint_as_float((unsigned)v << 16);
    _Float16 half;
    memcpy(&half, &v, 2);
    return (float)half;
}
unsigned short to_half(float v, bool fp16) {
    unsigned short out;
    if (fp16) {
        const _Float16 half = (_Float16)v;
        memcpy(&out, &half, 2);
        return out;
    }
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

// c (16 x 8) += a (16 x 16) * b (16 x 8). Lane l has rows l / 4 and 8 below of a and c, column l / 4 of b.
void product(const Fragments* const* in, Sums* const* out) {
    float a[16][16], b[8][16];
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < 4; r++)
            for (int k = 0; k < 2; k++) {
                const Fragments& own = *in[lane];
                const int row = lane / 4 + r % 2 * 8, at = lane % 4 * 2 + k;
                a[row][r / 2 * 8 + at] = from_half((unsigned short)(own.a[r] >> k * 16), own.fp16);
                if (r < 2) b[lane / 4][r * 8 + at] = from_half((unsigned short)(own.b[r] >> k * 16), own.fp16);
            }
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 4; e++) {
            float sum = in[lane]->c[e];
            const float *row = a[lane / 4 + e / 2 * 8], *column = b[lane % 4 * 2 + e % 2];
            for (int k = 0; k < 16; k++) sum += row[k] * column[k];
            (*out[lane])[e] = sum;
        }
}

}  // namespace emulator
