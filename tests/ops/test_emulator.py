"""The emulator of the CUDA kernels' device: what it must run, and what it must notice."""

import ctypes
import re

import pytest
import torch

from recnets.ops.cuda import nvrtc

from .emulator import FOLDER, Emulator


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.cuh")))
def test_twins_have_the_same_functions(file):
    def functions(text: str) -> list[str]:
        return sorted(re.findall(r"((?:template <[^>]*>\s*)?__device__ __forceinline__ [^{]*?)\s*\{", text))

    assert functions((FOLDER / file).read_text()) == functions((nvrtc.FOLDER / file).read_text())


# Bodies of a kernel of 2 blocks of 64 threads, with in[128], out[128] and counters[8].
START = """
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    float* shared = (float*)memory;  // 256 of them
    const int t = threadIdx.x, other = (t + 33) % 64, at = blockIdx.x * 64 + t;
"""
COPY = "copy_async<16>(base + t * 16, in + t / 2 * 4, true); copy_commit(); "
RIGHT = {
    "barrier": "shared[t] = in[at]; __syncthreads(); out[at] = shared[other];",
    "copy": COPY + "copy_wait<0>(); __syncthreads(); out[at] = shared[other * 4];",
    "grid": "out[at] = 1; arrive(counters); await(counters); if (out[127 - at] != 1) out[at] = 0;",
    "some threads end": "if (t >= 32) return; shared[t] = in[at]; __syncthreads(); out[at] = shared[31 - t];",
    "warp": "out[at] = __shfl_xor_sync(~0u, in[at], 5);",
    "variable": "__shared__ float sums[64]; sums[t] = in[at]; __syncthreads(); out[at] = sums[other];",
}
WRONG = {
    "shared[t] = in[at]; out[at] = shared[other];": "NaN",
    "__shared__ float sums[64]; sums[t] = in[at]; out[at] = sums[other];": "NaN",
    COPY + "__syncthreads(); out[at] = shared[other * 4];": "NaN",
    COPY + COPY + "copy_wait<2>(); __syncthreads(); out[at] = shared[other * 4];": "NaN",
    COPY + "copy_wait<0>(); out[at] = shared[other * 4];": "NaN",
    # The first half of the threads goes on to overwrite what the other half reads.
    "shared[t] = 1; __syncthreads(); out[at] = shared[other] / shared[other]; shared[t] = 0;": "NaN",
    "out[at] = 0; arrive(counters); out[at] = out[127 - at] / 0 * 0;": "NaN",
    "out[at] = load_shared1(base + 1024 + t * 4);": r"test, block \(., 0, 0\), thread \d+: 4 bytes at 1\d+",
    "store_shared(base - 4, (u32)t);": "4 bytes at -4 of shared memory, which has 1024",
    "out[at] = load_shared(base + 8).x;": "not aligned",
    "out[at] = ((float4*)(in + 1))->x;": "undefined behaviour",
    "int few[4] = {}; few[t % 5] = 1; out[at] = few[t % 3];": "undefined behaviour",
    "shared[256 + t] = 0;": "wrote to byte .* of shared memory",
    "out[128 + t] = 0;": r"wrote outside of a tensor of shape \(128,\)",
    "out[(long)1 << 40] = 0;": "no such memory",
    "out[at] = 1 / (int)counters[1];": "undefined behaviour|division",
    "if (blockIdx.x == 0) arrive(counters); await(counters);": "deadlock.*2 threads wait at await",
    "out[at] = t % 32 < 16 ? __shfl_xor_sync(~0u, in[at], 1) : 0;": "where lanes of the warp have ended|ends while",
}


def run(body: str, folder, seed: int = 0) -> torch.Tensor:
    device = Emulator(2, seed, folder)
    (folder / "test.cu").write_text(
        f'extern "C" __global__ void test(const float* in, float* out, u32* counters) {{ {START} {body} }}'
    )
    out, counters = torch.zeros(128), torch.zeros(8, dtype=torch.int32)
    kernel = device.kernel(("half.cuh", "memory.cuh", "test.cu"), (("FP16", 0), ("THREADS", 64)), "test", 1024)
    kernel((2, 1, 1), torch.arange(1.0, 129.0), out, counters, cooperative=True)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_runs(name, seed, tmp_path, emulated):
    assert run(RIGHT[name], tmp_path, seed).isfinite().all()


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_noticed(body, tmp_path, emulated):
    if WRONG[body] == "NaN":
        assert not run(body, tmp_path).isfinite().all()
        return
    with pytest.raises(RuntimeError, match=WRONG[body]):
        run(body, tmp_path)


def test_arguments_are_those_of_the_kernel(tmp_path, emulated):
    run(RIGHT["warp"], tmp_path)
    device = Emulator(2, 0, tmp_path)
    kernel = device.kernel(("half.cuh", "memory.cuh", "test.cu"), (("FP16", 0), ("THREADS", 64)), "test", 1024)
    out = torch.zeros(128)
    with pytest.raises(RuntimeError, match="number of arguments"):
        kernel((2, 1, 1), out, out)
    with pytest.raises(RuntimeError, match="size"):
        kernel((2, 1, 1), out, out, ctypes.c_int(1))
    with pytest.raises(RuntimeError, match="more than the device holds"):
        kernel((5, 1, 1), out, out, out, cooperative=True)
