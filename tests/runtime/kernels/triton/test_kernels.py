"""Every kernel against float64 over random shapes, in fp16 and fp32; on a GPU in bf16 too, which nothing else can."""

import pytest
import torch
from triton_cases import CASES

DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.float16]


def _places():
    for case, count in CASES.items():
        for seed in range(count):
            dtype = DTYPES[seed % 2]
            yield pytest.param(case, (seed, dtype), id=f"{case.__name__}-{seed}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("case", "place"), _places(), indirect=["place"])
def test_kernel(case, place):
    checks = list(case(place))
    assert checks
    for check in checks:
        assert check.passes, f"{check.what}: {check.error} > {check.tolerance}"
