"""Which keys and values the requests of a pass read, and who may see what: planned once a pass, read by every layer."""

import math
from dataclasses import dataclass

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from tetris_sglang.portable_cpu.grouping import group_requests

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


class Planner:
    """Plans passes over a model runner's requests."""

    def __init__(self, model_runner) -> None:
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.dtype = model_runner.dtype
        self.visible_bias = torch.zeros((), dtype=self.dtype, device=self.device)
        self.hidden_bias = torch.full_like(self.visible_bias, torch.finfo(self.dtype).min)
        self.columns = torch.arange(self.req_to_token_pool.req_to_token.shape[1], device=self.device)
        self.group_cost = _group_cost(model_runner)
        self.forward_metadata: Plan | None = None

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


def _group_cost(model_runner) -> float:
    """What another group costs in every layer and, once a pass, to plan: in cached rows gathered in the same time."""
    layers = [m for m in model_runner.model.modules() if isinstance(m, RadixAttention)]
    if not layers:
        return math.inf
    row_values = layers[0].tp_k_head_num * (layers[0].qk_head_dim + layers[0].v_head_dim)
    row_us = row_values * model_runner.dtype.itemsize / _GATHERED_BYTES_PER_US
    return (_GROUP_LAYER_US + _GROUP_PLAN_US / len(layers)) / row_us
