// All that inference.cu needs of a layer's parameters, in one launch; blockIdx.y: 0, W_x; 1, W_h; 2, the A_i; 3, both
// norms as z*s + t.
//
// Kernels (CO, CI, K, K) are in the order of pack.cuh. A_i = weight[:, i*SO : (i+1)*SO] of the transition (C_OUT, D*SO) is
// in [block of columns][i][16 channels][warp's columns][two tiles of 8 columns][lane][8 values], the last tile, where a
// warp's are odd, with [lane][4 values].

struct Matrix {
    const float* w;
    u16* out;
    long stride_co, stride_ci;
    int total, channels, outputs, d, twn, tnt;
};
// (scale, shift) of pairs of channels: out[c / 2] = (s_c, s_{c+1}, t_c, t_{c+1}).
struct Affine {
    const float *gamma, *beta, *mean, *var;
    float* out;
    int channels;
    float eps;
};

__device__ __forceinline__ void pack_matrix(const Matrix& job, int e) {
    if (e >= job.total) return;
    const int column = job.tnt * 128, inside = e % column, odd_from = job.tnt / 2 * 256;  // values of 16 channels, a warp
    int rest = e / column;
    const int twn = rest % job.twn;
    rest /= job.twn;
    const int k16 = rest % (job.channels / 16);
    rest /= job.channels / 16;
    const int i = rest % job.d, split = rest / job.d;
    int tile, lane, r;
    if (inside < odd_from) {
        lane = inside >> 3 & 31;
        r = inside >> 1 & 1;
        tile = inside / 256 * 2 + (inside >> 2 & 1);
    } else {
        lane = inside - odd_from >> 2;
        r = inside >> 1 & 1;
        tile = job.tnt - 1;
    }
    const int k = k16 * 16 + r * 8 + lane % 4 * 2 + (inside & 1), n = ((split * job.twn + twn) * job.tnt + tile) * 8 + lane / 4;
    job.out[e] = pack1(n < job.outputs ? job.w[n * job.stride_co + (long)(i * job.channels + k) * job.stride_ci] : 0.f);
}

__device__ __forceinline__ void fold(const Affine& job, int c) {
    if (c >= job.channels) return;
    const float scale = job.gamma[c] * rsqrtf(job.var[c] + job.eps);
    float* to = job.out + c / 2 * 4 + c % 2;
    to[0] = scale;
    to[2] = job.beta[c] - job.mean[c] * scale;
}

extern "C" __global__ void prepare(Job x, Job h, Matrix a, Affine steps, Affine last) {
    const int e = blockIdx.x * blockDim.x + threadIdx.x;
    if (blockIdx.y == 0) pack_kernel(x, e);
    if (blockIdx.y == 1) pack_kernel(h, e);
    if (blockIdx.y == 2) pack_matrix(a, e);
    if (blockIdx.y == 3) fold(steps, e), fold(last, e);
}
