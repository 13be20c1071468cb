"""Products over any number of rows, computed with few."""

import pytest
import torch
import torch.nn.functional as F

from llmq.runtime.layers.dense_product import dense_product, padded_rows


def test_few_numbers_of_rows_at_most_a_quarter_above():
    padded = [padded_rows(rows) for rows in range(1, 1025)]
    assert all(rows <= more <= rows + (rows - 1) // 4 for rows, more in enumerate(padded, 1))
    assert padded[:8] == list(range(1, 9))
    assert len(set(padded)) == 8 + 4 * 7
    assert [padded_rows(more) for more in padded] == padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 33, 70])
def test_padding_changes_no_row(dtype, rows):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((rows, 24), (40, 24), (40,)))
    expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.to(dtype).double())
    made = dense_product(x.to(dtype), weight.to(dtype), bias.to(dtype))
    assert made.shape == (rows, 40)
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)
