"""FlashInfer's two paged wrappers as its documentation has them: the same arguments, checked, and the attention that
they mean, computed token by token in float64 from the pages that a plan names."""

import torch


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, **options):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert not use_cuda_graph
        self.options, self.num_plans = options, 0

    def _keep(self, qo_indptr, indptr, indices, last_page_len, sizes, causal, options):
        self.num_plans += 1
        for host in (qo_indptr, indptr, last_page_len):
            assert host.device.type == "cpu", "planned on the host: a copy back would wait for the device"
            assert host.dtype == torch.int32
        assert indices.dtype == torch.int32
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert causal
        self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        assert self.num_qo_heads % self.num_kv_heads == 0
        assert ((last_page_len >= 1) & (last_page_len <= self.page_size)).all()
        self.qo_indptr, self.indptr = qo_indptr.tolist(), indptr.tolist()
        self.indices, self.last_page_len = indices.tolist(), last_page_len.tolist()
        self.dtypes = options.pop("q_data_type"), options.pop("kv_data_type")
        self.sm_scale, self.window_left = options.pop("sm_scale"), options.pop("window_left")
        self.soft_cap = options.pop("logits_soft_cap") or 0.0
        assert not options

    def run(self, q, paged_kv_cache):
        k, v = paged_kv_cache
        assert k.stride() == v.stride()  # its kernels take one set of strides
        assert k.stride()[1:] == (self.num_kv_heads * self.head_dim, self.head_dim, 1)
        assert k.shape[1:] == v.shape[1:] == (self.page_size, self.num_kv_heads, self.head_dim)
        assert q.shape[1:] == (self.num_qo_heads, self.head_dim)
        assert q.is_contiguous()
        assert (q.dtype, k.dtype, v.dtype) == (self.dtypes[0], self.dtypes[1], self.dtypes[1])
        output, group = torch.empty_like(q), self.num_qo_heads // self.num_kv_heads
        for row in range(len(self.last_page_len)):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]]
            length = (len(pages) - 1) * self.page_size + self.last_page_len[row]
            keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
            first, last = self.qo_indptr[row : row + 2]
            for token in range(first, last):
                position = length - (last - token)
                begin = 0 if self.window_left < 0 else max(0, position - self.window_left)
                for head in range(self.num_qo_heads):
                    seen = keys[begin : position + 1, head // group]
                    scores = seen @ q[token, head].double() * self.sm_scale
                    if self.soft_cap > 0:
                        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                    made = torch.softmax(scores, dim=0) @ values[begin : position + 1, head // group]
                    output[token, head] = made.to(q.dtype)
        return output


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options):
        if not self.options["use_tensor_cores"]:
            assert num_qo_heads // num_kv_heads in (1, 2, 4, 8), "no kernel of this group size is compiled"
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        queries = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(queries, indptr, indices, last_page_len, sizes, True, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        causal=False,
        **options,
    ):
        assert head_dim_vo in (None, head_dim_qk)
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, causal, options)
