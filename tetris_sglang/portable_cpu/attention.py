"""The `torch_ragged` attention backend: paged attention in plain torch, any number of queries per request.

One `Plan` is built per forward pass and read by every layer. A layer then costs two row gathers from the
KV cache and a `scaled_dot_product_attention` for each group of requests of like lengths; nothing loops over requests or
tokens.

Grouped-query attention folds the query heads of a key-value head into the query axis: a request with `q`
queries and `g` query heads per key-value head becomes `q * g` rows, and keys and values are never repeated.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from tetris_sglang.portable_cpu.defaults import ATTENTION_BACKEND
from tetris_sglang.portable_cpu.grouping import group_requests

# Up to so many queries per request, query heads are folded. Beyond, the kernel is as fast without, and the
# bias stays `g` times smaller.
FOLDED_QUERIES = 64
# A prefill batch of uneven lengths is cut into tiles of so many queries where padding would double its rows.
TILE_QUERIES = 64
# On the machine of docs/lessons.md; they decide what is computed together, and nothing else.
_GATHERED_BYTES_PER_US = 3500.0
_QUERY_COST = 0.07
"""Of one query on one cached row, in rows gathered."""
_GROUP_LAYER_US, _GROUP_PLAN_US = 60.0, 200.0
"""Of another group, in every layer and once a pass."""


@dataclass(slots=True)
class Group:
    """Requests of a pass that are padded alike.

    Attributes:
        bs, q, kv: requests, and queries and cached tokens of each after padding.
        slots: [bs * kv] cache rows, request after request; where one is shorter 0, the cache's spare row.
        bias: [bs, 1, q or 1, kv] added to the scores: 0 where visible, elsewhere the dtype's least number, not
            infinity, so that a row that sees nothing stays finite. None: every query sees itself and the
            queries before it, and there is nothing else in the cache.
        gathered: keys and values by layer, each [bs * kv, kv_heads, head_dim], that the passes of a drafted chain share: a
            pass adds what it wrote itself. None: every pass gathers.
        newest: [bs] row of `slots` that this pass writes; only read with `gathered`.
    """

    bs: int
    q: int
    kv: int
    slots: Tensor
    bias: Tensor | None
    gathered: dict[int, tuple[Tensor, Tensor]] | None = None
    newest: Tensor | None = None
    _folded: Tensor | None = None

    def folded_bias(self, heads: int) -> Tensor:
        """[bs, 1, q * heads or 1, kv] bias for rows ordered by query, then head; kept for the next layer."""
        if self.q == 1 or heads == 1:
            return self.bias
        rows = self.q * heads
        if self._folded is None or self._folded.shape[2] != rows:
            folded = self.bias[:, :, :, None].expand(-1, -1, -1, heads, -1)
            self._folded = folded.reshape(self.bs, 1, rows, self.kv)
        return self._folded


@dataclass(slots=True)
class Plan:
    """Where one pass reads its keys and values, and who may see what.

    Attributes:
        groups: of all requests; padded rows stand group after group.
        pad: [sum of bs * q] packed query of each padded row; None if every request has exactly `q` queries.
        unpad: [tokens] padded row of each packed query; None likewise.
    """

    groups: list[Group]
    pad: Tensor | None = None
    unpad: Tensor | None = None


class TorchRaggedBackend(AttentionBackend):
    """Extend, decode, draft-decode and verify on any torch device; see the module's docstring.

    Raises:
        ValueError: the model needs a kind of attention that this backend does not compute.
    """

    def __init__(self, model_runner):
        super().__init__()
        refuse_unsupported(model_runner)
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.dtype = model_runner.dtype
        self.visible_bias = torch.zeros((), dtype=self.dtype, device=self.device)
        self.hidden_bias = torch.full_like(self.visible_bias, torch.finfo(self.dtype).min)
        self.columns = torch.arange(self.req_to_token_pool.req_to_token.shape[1], device=self.device)
        self.group_cost = _group_cost(model_runner)
        self.max_context_len = model_runner.model_config.context_len
        self.forward_metadata: Plan | None = None

    def support_triton(self) -> bool:
        return False

    # ------------------------------------------------------------------ planning

    def plan(
        self,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        q_lens: Tensor | None,
        max_kv_len: int,
        max_q_len: int,
        total_q_tokens: int,
        tree_mask: Tensor | None = None,
    ) -> Plan:
        """Plan a pass and make it the one that the next `forward` calls use.

        Args:
            req_pool_indices: [bs] rows of the request-to-token table.
            kv_lens: [bs] tokens in each request's cache, the pass's own included; at least `q_lens`.
            q_lens: [bs] queries of each request, packed request after request in the pass's input; None: one each.
            max_kv_len, max_q_len: upper bounds known on the host.
            total_q_tokens: rows of the pass's input. `bs * max_q_len` means that all lengths are equal;
                more than the sum of `q_lens` means that the input is padded at its end.
            tree_mask: [bs, m, m] bool, m >= max_q_len: whether query i sees query j of its request.
                None: a chain, each query sees those before it and itself.
        Sync: none; on a CPU, where reading lengths is no wait, requests are put into groups, and bounds are made tight.
        Example: kv_lens [5, 9], q_lens [2, 3], max_kv_len 9, max_q_len 3, total_q_tokens 5: the queries at
            positions 3, 4 of the first request and 6, 7, 8 of the second.
        """
        bs = req_pool_indices.shape[0]
        if q_lens is None:
            q_lens = torch.ones_like(kv_lens)
        order, parts = torch.arange(bs, device=kv_lens.device), [(slice(None), max_kv_len, max_q_len)]
        if self.device == "cpu":
            by_length, sizes = group_requests(
                kv_lens.numpy(), q_lens.numpy(), query_cost=_QUERY_COST, group_cost=self.group_cost
            )
            order = torch.from_numpy(by_length)
            parts = [(part, max(1, int(kv_lens[part].max())), int(q_lens[part].max())) for part in order.split(sizes)]
        groups = [
            self._plan_group(
                req_pool_indices[part],
                kv_lens[part],
                q_lens[part],
                max_kv,
                max_q,
                None if tree_mask is None else tree_mask[part],
            )
            for part, max_kv, max_q in parts
        ]
        plan = Plan(groups)
        if len(groups) > 1 or total_q_tokens != bs * groups[0].q:
            self._pad(plan, order, q_lens, total_q_tokens)
        self.forward_metadata = plan
        return plan

    def plan_first(self, req_pool_indices: Tensor, q_lens: Tensor, max_q_len: int, total_q_tokens: int) -> Plan:
        """`plan` for requests with nothing in the cache but the pass's own tokens, which needs no bias."""
        column = self.columns[:max_q_len]
        slots = self._slots(req_pool_indices, column < q_lens[:, None])
        bs = req_pool_indices.shape[0]
        plan = Plan([Group(bs, max_q_len, max_q_len, slots, None)])
        if total_q_tokens != bs * max_q_len:
            self._pad(plan, torch.arange(bs, device=q_lens.device), q_lens, total_q_tokens)
        self.forward_metadata = plan
        return plan

    def plan_tiles(
        self,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        q_lens: Tensor,
        max_kv_len: int,
        tiles: int,
        total: int,
    ) -> Plan:
        """`plan` with every request cut into tiles of `TILE_QUERIES` queries, each planned as a request.

        Args:
            tiles: how many there are, known on the host.
        """
        counts = (q_lens + TILE_QUERIES - 1) // TILE_QUERIES
        owner = torch.repeat_interleave(counts, output_size=tiles)
        tile = torch.arange(tiles, device=q_lens.device) - (counts.cumsum(0) - counts)[owner]
        seen = ((tile + 1) * TILE_QUERIES).minimum(q_lens[owner])  # queries up to the tile's end
        kv_lens = (kv_lens - q_lens)[owner] + seen
        return self.plan(req_pool_indices[owner], kv_lens, seen - tile * TILE_QUERIES, max_kv_len, TILE_QUERIES, total)

    def _plan_group(
        self,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        q_lens: Tensor,
        max_kv_len: int,
        max_q_len: int,
        tree_mask: Tensor | None,
    ) -> Group:
        """Arguments as of `plan`, for the group's requests."""
        column = self.columns[:max_kv_len]  # the bound may lie beyond the table
        within = column < kv_lens[:, None]  # [bs, kv]
        if max_q_len == 1:
            visible = within[:, None]
        else:
            query = self.columns[:max_q_len]
            first = (kv_lens - q_lens)[:, None]  # position of a request's first query
            if tree_mask is None:
                visible = column <= (first + query)[:, :, None]
            else:
                node = (column - first).clamp_(0, tree_mask.shape[-1] - 1)
                visible = tree_mask[:, :max_q_len].gather(2, node[:, None].expand(-1, max_q_len, -1))
                visible = visible | (column < first)[:, None]
            visible = visible & within[:, None]
        slots = self._slots(req_pool_indices, within)
        return Group(kv_lens.shape[0], max_q_len, column.shape[0], slots, self._bias(visible)[:, None])

    def _slots(self, req_pool_indices: Tensor, within: Tensor) -> Tensor:
        table = self.req_to_token_pool.req_to_token[:, : within.shape[1]]
        return torch.where(within, table.index_select(0, req_pool_indices), 0).view(-1)

    def _bias(self, visible: Tensor) -> Tensor:
        return torch.where(visible, self.visible_bias, self.hidden_bias)

    def _pad(self, plan: Plan, order: Tensor, q_lens: Tensor, total_q_tokens: int) -> None:
        """Say where packed queries stand among padded rows.

        Args:
            order: [bs] the requests, group after group.
        """
        end = q_lens.cumsum(0)
        start = end - q_lens
        token = torch.arange(total_q_tokens, device=q_lens.device)
        owner = torch.searchsorted(end, token, right=True).clamp_(max=len(end) - 1)
        # Each request's first padded row, and how many it has.
        widths = [group.q for group in plan.groups for _ in range(group.bs)]
        width = torch.tensor(widths, device=q_lens.device)
        first, num_rows = torch.empty_like(width), torch.empty_like(width)
        first[order], num_rows[order] = width.cumsum(0) - width, width
        # Padding tokens repeat a row of the last request; nobody reads them.
        plan.unpad = first[owner] + (token - start[owner]).minimum(num_rows[owner] - 1)
        pads = [
            start[part][:, None] + self.columns[: group.q]
            for part, group in zip(order.split([g.bs for g in plan.groups]), plan.groups, strict=True)
        ]
        plan.pad = torch.cat([pad.view(-1) for pad in pads]).clamp_(max=total_q_tokens - 1)

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan the pass that `forward_batch` describes."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
        elif mode.is_decode():
            bs, kv_lens = forward_batch.batch_size, forward_batch.seq_lens
            self.plan(forward_batch.req_pool_indices, kv_lens, None, _longest(forward_batch), 1, bs)
        elif mode.is_target_verify():
            self._plan_verify(forward_batch)
        else:
            self._plan_extend(forward_batch)

    def _plan_verify(self, forward_batch) -> None:
        bs, spec_info, seq_lens = forward_batch.batch_size, forward_batch.spec_info, forward_batch.seq_lens
        n = spec_info.draft_token_num
        layout = getattr(spec_info, "ragged_verify_layout", None)
        if layout is None:
            q_lens, total = torch.full_like(seq_lens, n), bs * n
        else:
            q_lens, total = layout.verify_lens, forward_batch.input_ids.shape[0]
        mask = spec_info.custom_mask if spec_info.tree_topk != 1 else None
        if mask is not None:
            if mask.numel() != bs * n * n:
                raise ValueError(
                    f"torch_ragged reads tree masks of {n} x {n} per request (QLEN_ONLY); got {mask.numel()} "
                    f"entries for {bs} requests"
                )
            mask = mask.view(bs, n, n)
        max_kv_len = _longest(forward_batch) + n
        self.plan(forward_batch.req_pool_indices, seq_lens + q_lens, q_lens, max_kv_len, n, total, mask)

    def _plan_extend(self, forward_batch) -> None:
        indices, q_lens = forward_batch.req_pool_indices, forward_batch.extend_seq_lens
        lens = forward_batch.extend_seq_lens_cpu
        max_q_len, total = max(lens), sum(lens)
        tiles = sum(-(-n // TILE_QUERIES) for n in lens)
        prefixes = forward_batch.extend_prefix_lens_cpu
        if len(lens) * max_q_len > 2 * tiles * TILE_QUERIES:
            max_kv_len = _longest(forward_batch)
            self.plan_tiles(indices, forward_batch.seq_lens, q_lens, max_kv_len, tiles, total)
        elif prefixes is not None and not any(prefixes):
            self.plan_first(indices, q_lens, max_q_len, total)
        else:
            max_kv_len = _longest(forward_batch)
            self.plan(indices, forward_batch.seq_lens, q_lens, max_kv_len, max_q_len, total)

    # ------------------------------------------------------------------ layers

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> Tensor:
        if kwargs:
            raise NotImplementedError(
                f"--attention-backend {ATTENTION_BACKEND} does not compute attention with "
                f"{', '.join(kwargs)}; try --attention-backend torch_native"
            )
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self.attend(q, layer, self.forward_metadata)

    forward_decode = forward_extend

    def attend(self, q: Tensor, layer, plan: Plan) -> Tensor:
        """[tokens, heads * head_dim] attention of one layer's packed queries to what `plan` lets them see."""
        if plan.pad is not None:
            q = q.index_select(0, plan.pad)
        if len(plan.groups) == 1:
            out = self._attend_group(q, layer, plan.groups[0])
        else:
            parts = q.split([group.bs * group.q for group in plan.groups])
            out = torch.cat([self._attend_group(part, layer, group) for part, group in zip(parts, plan.groups, strict=True)])
        return out if plan.unpad is None else out.index_select(0, plan.unpad)

    def _attend_group(self, q: Tensor, layer, group: Group) -> Tensor:
        """[bs * q, heads * head_dim] attention of a group's padded queries, of the same shape."""
        bs, kv_heads = group.bs, layer.tp_k_head_num
        heads = layer.tp_q_head_num // kv_heads
        keys, values = (rows.view(bs, group.kv, kv_heads, -1).transpose(1, 2) for rows in self._gather(layer.layer_id, group))
        if group.q <= FOLDED_QUERIES and group.bias is not None:
            q = q.view(bs, group.q, kv_heads, heads, -1).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q.reshape(bs, kv_heads, group.q * heads, -1),
                keys,
                values,
                attn_mask=group.folded_bias(heads),
                scale=layer.scaling,
            )
            out = out.view(bs, kv_heads, group.q, heads, -1)
        else:
            out = F.scaled_dot_product_attention(
                q.view(bs, group.q, layer.tp_q_head_num, -1).transpose(1, 2),
                keys,
                values,
                attn_mask=group.bias,
                is_causal=group.bias is None,
                scale=layer.scaling,
                enable_gqa=heads > 1,
            )
        return out.transpose(1, 2).reshape(bs * group.q, -1)

    def _gather(self, layer_id: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values [bs * kv, kv_heads, head_dim] of one layer, in the group's order."""
        pool = self.token_to_kv_pool
        buffers = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        if group.gathered is None:
            return tuple(buffer.index_select(0, group.slots) for buffer in buffers)
        if layer_id not in group.gathered:
            group.gathered[layer_id] = tuple(buffer.index_select(0, group.slots) for buffer in buffers)
        else:
            slots = group.slots[group.newest]
            for rows, buffer in zip(group.gathered[layer_id], buffers, strict=True):
                rows.index_copy_(0, group.newest, buffer.index_select(0, slots))
        return group.gathered[layer_id]


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
        if bs == 0 or forward_batch.forward_mode.is_idle():
            return
        seq_lens = forward_batch.seq_lens
        device = seq_lens.device
        backend = self.attn_backends[0]
        column = backend.columns[: _longest(forward_batch) + steps - 1]
        within = column < (seq_lens + (steps - 1))[:, None]
        indices = forward_batch.req_pool_indices
        if branches == 1:
            slots = backend._slots(indices, within)
        else:
            # The drafts of branch b lie b * steps columns further on than those of branch 0.
            shift = torch.arange(branches, device=device) * steps
            source = column + (column >= seq_lens[:, None])[:, None] * shift[:, None]  # [bs, branches, kv]
            source = torch.where(within[:, None], source, 0)
            rows = self.req_to_token_pool.req_to_token[indices[:, None, None], source]
            slots = torch.where(within[:, None], rows, 0).view(-1)
            seq_lens = seq_lens.repeat_interleave(branches, output_size=bs * branches)
        ends = seq_lens + torch.arange(1, steps, device=device)[:, None]  # [steps - 1, bs * branches]
        bias = backend._bias(column < ends[:, :, None])[:, :, None, None]
        num_columns = column.shape[0]
        # Branches of a tree inherit their parents' rows between the passes, so they gather anew.
        gathered = {} if branches == 1 else None
        newest = ends - 1 + num_columns * torch.arange(bs * branches, device=device)
        for step, backend in enumerate(self.attn_backends):
            group = Group(bs * branches, 1, num_columns, slots, bias[step], gathered, newest[step])
            backend.forward_metadata = Plan([group])


def _group_cost(model_runner) -> float:
    """What another group costs in every layer and, once a pass, to plan: in cached rows gathered in the same time."""
    layers = [m for m in model_runner.model.modules() if isinstance(m, RadixAttention)]
    if not layers:
        return math.inf
    row_values = layers[0].tp_k_head_num * (layers[0].qk_head_dim + layers[0].v_head_dim)
    row_us = row_values * model_runner.dtype.itemsize / _GATHERED_BYTES_PER_US
    return (_GROUP_LAYER_US + _GROUP_PLAN_US / len(layers)) / row_us


def _longest(forward_batch) -> int:
    """The batch's longest `seq_lens` entry, from the host's copy where there is one."""
    lens = forward_batch.seq_lens_cpu
    return int((forward_batch.seq_lens if lens is None else lens).max())


def refuse_unsupported(model_runner) -> None:
    """Raise ValueError if a layer of the model wants attention that this backend does not compute."""
    reasons = set()
    if model_runner.use_mla_backend:
        reasons.add("multi-head latent attention")
    for layer in model_runner.model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            reasons.add("a sliding window")
        if layer.logit_cap:
            reasons.add("a cap on attention logits")
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            reasons.add("cross or bidirectional attention")
    if reasons:
        raise ValueError(
            f"--attention-backend {ATTENTION_BACKEND} does not support this model, which uses "
            f"{', '.join(sorted(reasons))}; try --attention-backend torch_native without speculative decoding"
        )
