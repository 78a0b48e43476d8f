"""CUDA C++ kernels for training in half precision, compiled at run time."""
