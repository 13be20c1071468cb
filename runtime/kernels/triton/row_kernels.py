"""What is done to each row between the products: RMSNorm, the gate of an MLP, and rounding to 8 bits."""

import triton
import triton.language as tl
from torch import Tensor

from llmq.runtime.kernels.triton.launch import Launch
from llmq.runtime.kernels.triton.numbers import fp32_to_e4m3, rounded, tanh

GATES = {"silu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
MOST_FEATURES = 32768  # of a row that one program holds in registers


@triton.jit
def _rms_norm(
    x,
    delta,
    weight,
    total,
    y,
    eps,
    delta_scale,
    x_stride,
    delta_stride,
    num_features,
    PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """One row. Bytes: x, delta and weight read, the sum and y written: 4 or 2 rows. FLOPs: 5 a number."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, PADDED)
    is_feature = feature < num_features
    values = tl.load(x + row * x_stride + feature, mask=is_feature, other=0.0).to(tl.float32)
    if HAS_DELTA:
        more = tl.load(delta + row * delta_stride + feature, mask=is_feature, other=0.0).to(tl.float32)
        # Rounded where torch's operations round, so that the residual stream is the same.
        more = (more * delta_scale).to(x.dtype.element_ty).to(tl.float32)
        summed = (values + more).to(x.dtype.element_ty)
        tl.store(total + row * num_features + feature, summed, mask=is_feature)
        values = summed.to(tl.float32)
    mean = tl.sum(values * values, 0) / num_features
    scale = tl.load(weight + feature, mask=is_feature, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt_rn(mean + eps)) * scale
    tl.store(y + row * num_features + feature, normed.to(y.dtype.element_ty), mask=is_feature)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor,
    delta: Tensor | None = None,
    delta_scale: float = 1.0,
    total: Tensor | None = None,
) -> Launch:
    """y = s / sqrt(mean(s²) + eps) · weight with s = x + delta_scale · delta, which goes to `total`; without a delta
    s = x. x, delta [num_rows, num_features] of any row stride; weight [num_features]; y and total contiguous, in the
    dtype of x, or `total` x itself where it is contiguous. Computed in float32, s rounded to its dtype."""
    num_rows, num_features = x.shape
    padded = triton.next_power_of_2(num_features)
    return Launch(
        _rms_norm,
        (num_rows,),
        {
            "x": x,
            "delta": delta,
            "weight": weight,
            "total": total,
            "y": y,
            "eps": float(eps),
            "delta_scale": float(delta_scale),
            "x_stride": x.stride(0),
            "delta_stride": 0 if delta is None else delta.stride(0),
            "num_features": num_features,
        },
        {"PADDED": padded, "HAS_DELTA": delta is not None},
        num_warps=min(16, max(4, padded // 512)),
        num_stages=1,
    )


@triton.jit
def _gate(wide, y, wide_stride, num_features, KIND: tl.constexpr, FEATURES: tl.constexpr):
    """FEATURES numbers of one row. Bytes: two numbers read, one written. FLOPs: up to 10 a number."""
    row = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < num_features
    gate = tl.load(wide + row * wide_stride + feature, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(wide + row * wide_stride + num_features + feature, mask=is_feature, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 2:
        gate = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = tl.maximum(gate, 0.0)
    tl.store(y + row * num_features + feature, (gate * up).to(y.dtype.element_ty), mask=is_feature)


def gate(wide: Tensor, activation: str, y: Tensor) -> Launch:
    """y = f(wide[:, :n]) · wide[:, n:], with f by its name in `GATES`, in float32, rounded once. wide [num_rows, 2 n]
    of any row stride, y [num_rows, n] contiguous."""
    num_rows, num_features = y.shape
    features = min(1024, triton.next_power_of_2(num_features))
    return Launch(
        _gate,
        (triton.cdiv(num_features, features), num_rows),
        {"wide": wide, "y": y, "wide_stride": wide.stride(0), "num_features": num_features},
        {"KIND": GATES[activation], "FEATURES": features},
        num_stages=1,
    )


@triton.jit
def _round_rows(
    x,
    static_scale,
    q,
    scales,
    x_stride,
    num_features,
    limit,
    PADDED: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    """One row. Bytes: x read, one byte a number and a scale written. FLOPs: 4 a number."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, PADDED)
    is_feature = feature < num_features
    values = tl.load(x + row * x_stride + feature, mask=is_feature, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(static_scale)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 0), 1e-12), limit)
        tl.store(scales + row, scale)
    values = tl.div_rn(values, scale + tl.zeros_like(values))
    if IS_INT8:
        code = rounded(tl.minimum(tl.maximum(values, -128.0), 127.0)).to(tl.int8)
    else:
        code = fp32_to_e4m3(values)
    tl.store(q + row * num_features + feature, code, mask=is_feature)


def round_rows(x: Tensor, q: Tensor, scales: Tensor | None, static_scale: Tensor | None = None) -> Launch:
    """q = round(x / s) in int8 or in e4m3's codes (uint8), by the dtype of `q` [num_rows, num_features], with one s a
    row into `scales` [num_rows], float32 (max|x| / 127.5 or 448), or the one of `static_scale`: to the last bit
    the numbers of `layers.rounded_input`."""
    num_rows, num_features = x.shape
    is_int8 = q.is_signed()
    padded = triton.next_power_of_2(num_features)
    return Launch(
        _round_rows,
        (num_rows,),
        {
            "x": x,
            "static_scale": static_scale,
            "q": q,
            "scales": scales,
            "x_stride": x.stride(0),
            "num_features": num_features,
            "limit": 127.5 if is_int8 else 448.0,
        },
        {"PADDED": padded, "IS_INT8": is_int8, "IS_STATIC": static_scale is not None},
        num_warps=min(16, max(4, padded // 512)),
        num_stages=1,
    )
