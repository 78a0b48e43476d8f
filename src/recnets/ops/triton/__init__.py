"""Fused kernels for CRC layers, in Triton; imported only where they are used."""
