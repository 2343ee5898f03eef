"""The `torch_ragged` attention backend: paged attention in plain torch, with a ragged number of queries per request.

One `Plan` is built per forward pass and read by every layer. A layer then costs two row gathers from the
KV cache and one `scaled_dot_product_attention`; nothing loops over requests or tokens.

Grouped-query attention folds the query heads of a key-value head into the query axis, so keys and values are
never repeated: a request with `q` queries and `g` query heads per key-value head becomes `q * g` rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

NAME = "torch_ragged"

@dataclass(slots=True)
class Plan:
    """Where one pass reads its keys and values, and who may see what.

    Attributes:
        slots: [bs * kv] cache rows, request after request; 0 (the cache's spare row) where a request ends earlier.
        bias: [bs, 1, q or 1, kv] added to the scores: 0 where visible, the dtype's least number elsewhere.
        bs, q, kv: padded sizes.
        pad: [bs * q] packed query of each padded row, or None if every request has exactly `q` queries.
        unpad: [tokens] padded row of each packed query, or None likewise.
    """

    slots: Tensor
    bias: Tensor
    bs: int
    q: int
    kv: int
    pad: Tensor | None = None
    unpad: Tensor | None = None

class TorchRaggedBackend(AttentionBackend):
    """Extend, decode, draft-decode and verify on any torch device; see the module's docstring."""

    def __init__(self, model_runner):
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.dtype = model_runner.dtype
        self.hidden_bias = torch.finfo(self.dtype).min
        self.max_context_len = model_runner.model_config.context_len
        self.current: Plan | None = None

    def support_triton(self) -> bool:
        return False

    # ------------------------------------------------------------------ planning

    def plan(
        self,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        q_lens: Tensor,
        max_kv_len: int,
        max_q_len: int,
        total_q_tokens: int,
        tree_mask: Tensor | None = None,
    ) -> Plan:
        """Plan a pass and make it the one that `forward` uses.

        Args:
            req_pool_indices: [bs] rows of the request-to-token table.
            kv_lens: [bs] tokens in each request's cache, the pass's own included; at least `q_lens`.
            q_lens: [bs] queries of each request, packed request after request in the pass's input.
            max_kv_len, max_q_len: host-known upper bounds.
            total_q_tokens: rows of the pass's input. `bs * max_q_len` means that all lengths are equal.
            tree_mask: [bs, m, m] bool with m >= max_q_len: whether query i sees query j. None: a causal chain.
        Sync: none.
        """
        bs = kv_lens.shape[0]
        table = self.req_to_token_pool.req_to_token
        column = torch.arange(max_kv_len, device=table.device)
        kv_lens = kv_lens[:, None]
        within = column < kv_lens  # [bs, kv]
        rows = table[:, :max_kv_len].index_select(0, req_pool_indices)
        slots = torch.where(within, rows, 0).view(-1)

        uniform = total_q_tokens == bs * max_q_len
        if max_q_len == 1:
            visible = within[:, None]
        else:
            first = kv_lens - q_lens[:, None]  # [bs, 1] position of a request's first query
            query = torch.arange(max_q_len, device=table.device)
            if tree_mask is None:
                visible = column <= (first + query)[:, :, None]
            else:
                node = (column - first).clamp_(0, tree_mask.shape[-1] - 1)
                visible = tree_mask[:, :max_q_len].gather(2, node[:, None].expand(bs, max_q_len, max_kv_len))
                visible = visible | (column < first)[:, None]
            visible = visible & within[:, None]
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=table.device)
        bias.masked_fill_(~visible, self.hidden_bias)
        plan = Plan(slots, bias[:, None], bs, max_q_len, max_kv_len)

        if not uniform:
            end = q_lens.cumsum(0)
            start = end - q_lens
            token = torch.arange(total_q_tokens, device=table.device)
            # Rows past the last request, if the input is padded, repeat its last query.
            owner = torch.searchsorted(end, token, right=True).clamp_(max=bs - 1)
            plan.unpad = owner * max_q_len + (token - start[owner]).clamp_(max=max_q_len - 1)
            query = torch.arange(max_q_len, device=table.device)
            plan.pad = (start[:, None] + query).clamp_(max=total_q_tokens - 1).view(-1)
        self.current = plan
        return plan

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan the pass that `forward_batch` describes."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.current = None
            return
        bs = forward_batch.batch_size
        tree_mask = None
        if mode.is_decode():
            kv_lens, max_kv_len = forward_batch.seq_lens, _longest(forward_batch)
            q_lens, max_q_len, total = None, 1, bs
        elif mode.is_target_verify():
            spec_info = forward_batch.spec_info
            layout = getattr(spec_info, "ragged_verify_layout", None)
            n = spec_info.draft_token_num
            if layout is None:
                q_lens = torch.full_like(forward_batch.seq_lens, n)
                total = bs * n
            else:
                q_lens = layout.verify_lens
                total = forward_batch.input_ids.shape[0]
            kv_lens, max_q_len, max_kv_len = forward_batch.seq_lens + q_lens, n, _longest(forward_batch) + n
            if spec_info.tree_topk != 1 and spec_info.custom_mask is not None and spec_info.custom_mask.numel():
                tree_mask = spec_info.custom_mask.view(bs, n, n)
        else:
            kv_lens, q_lens = forward_batch.seq_lens, forward_batch.extend_seq_lens
            lens = forward_batch.extend_seq_lens_cpu
            lens = lens if isinstance(lens, list) else q_lens.tolist()
            max_q_len, total = max(lens), sum(lens)
            max_kv_len = _longest(forward_batch)
        self.plan(forward_batch.req_pool_indices, kv_lens, q_lens, max_kv_len, max_q_len, total, tree_mask)

    # ------------------------------------------------------------------ layers

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self.attend(q, layer, self.current)

    forward_decode = forward_extend

    def attend(self, q: Tensor, layer, plan: Plan) -> Tensor:
        """[tokens, heads * head_dim] attention output of one layer."""
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        group = heads // kv_heads
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        keys = keys.index_select(0, plan.slots).view(plan.bs, plan.kv, kv_heads, -1).transpose(1, 2)
        values = values.index_select(0, plan.slots).view(plan.bs, plan.kv, kv_heads, -1).transpose(1, 2)

        if plan.pad is not None:
            q = q.index_select(0, plan.pad)
        rows = plan.q * group
        q = q.view(plan.bs, plan.q, kv_heads, group, -1).transpose(1, 2).reshape(plan.bs, kv_heads, rows, -1)
        bias = plan.bias[:, :, :, None].expand(-1, -1, -1, group, -1).reshape(plan.bs, 1, rows, plan.kv)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=layer.scaling)
        out = out.view(plan.bs, kv_heads, plan.q, group, -1).transpose(1, 2).reshape(plan.bs * plan.q, -1)
        return out if plan.unpad is None else out.index_select(0, plan.unpad)

class TorchRaggedMultiStepDraftBackend:
    """One backend per draft step, as the EAGLE/STANDALONE draft loop wants them (`attn_backends[i]`)."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.attn_backends = [TorchRaggedBackend(model_runner) for _ in range(speculative_num_steps - 1)]

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan every step at once: step i sees a request's prefix and its branch's i + 1 newest drafts."""
        bs, branches, steps = forward_batch.batch_size, self.topk, self.speculative_num_steps
        seq_lens = forward_batch.seq_lens.long()
        table = self.req_to_token_pool.req_to_token
        kv = _longest(forward_batch) + steps - 1
        column = torch.arange(kv, device=table.device)
        # Branch b of a request keeps its drafts `b * steps` columns further on.
        shift = torch.arange(branches, device=table.device) * steps
        draft = column >= seq_lens[:, None]  # [bs, kv]
        source = column + draft[:, None] * shift[:, None]  # [bs, branches, kv]
        source.clamp_(max=table.shape[1] - 1)
        rows = table[forward_batch.req_pool_indices[:, None, None], source]
        last = column < (seq_lens + steps - 1)[:, None]
        slots = torch.where(last[:, None], rows, 0).view(-1)

        lens = seq_lens.repeat_interleave(branches) if branches > 1 else seq_lens
        ends = lens + torch.arange(1, steps, device=table.device)[:, None]  # [steps - 1, bs * branches]
        backend = self.attn_backends[0]
        bias = torch.zeros(steps - 1, bs * branches, kv, dtype=backend.dtype, device=table.device)
        bias.masked_fill_(column >= ends[:, :, None], backend.hidden_bias)
        for i, backend in enumerate(self.attn_backends):
            backend.current = Plan(slots, bias[i, :, None, None], bs * branches, 1, kv)

def _longest(forward_batch) -> int:
    """The batch's longest `seq_lens` entry, from the host's copy where there is one."""
    lens = forward_batch.seq_lens_cpu
    return int((forward_batch.seq_lens if lens is None else lens).max())

