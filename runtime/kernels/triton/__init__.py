"""Triton kernels: CUDA and ROCm GPUs. A module is a kernel, its contract, and what plans its launch.

In all of them bf16 and fp8 appear only in loads, stores and dots, and arithmetic is float32: that is the faster choice
where it matters, and what Triton's interpreter, in which they are tested without a GPU, computes faithfully.
"""
