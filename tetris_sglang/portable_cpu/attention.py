"""The `torch_ragged` attention backend: paged attention in plain torch, any number of queries per request.

One `Plan` is built per forward pass and read by every layer. A layer then costs two row gathers from the
KV cache and a `scaled_dot_product_attention` for each group of requests of like lengths; nothing loops over requests or
tokens.

Grouped-query attention folds the query heads of a key-value head into the query axis: a request with `q`
queries and `g` query heads per key-value head becomes `q * g` rows, and keys and values are never repeated.
"""

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from tetris_sglang.portable_cpu.defaults import ATTENTION_BACKEND
from tetris_sglang.portable_cpu.plans import TILE_QUERIES, Group, Plan, Planner

# Up to so many queries per request, query heads are folded. Beyond, the kernel is as fast without, and the
# bias stays `g` times smaller.
FOLDED_QUERIES = 64


class TorchRaggedBackend(Planner, AttentionBackend):
    """Extend, decode, draft-decode and verify on any torch device; see the module's docstring.

    Raises:
        ValueError: the model needs a kind of attention that this backend does not compute.
    """

    def __init__(self, model_runner):
        AttentionBackend.__init__(self)
        refuse_unsupported(model_runner)
        Planner.__init__(self, model_runner)
        self._is_bidirectional = AttentionType.ENCODER_ONLY in _attention_types(model_runner.model)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len

    def support_triton(self) -> bool:
        return False

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
        if self._is_bidirectional:  # a block of drafts, every one of which sees all of them
            mask = torch.ones((bs * n * n,), dtype=torch.bool, device=seq_lens.device)
        else:
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


def _longest(forward_batch) -> int:
    """The batch's longest `seq_lens` entry, from the host's copy where there is one."""
    lens = forward_batch.seq_lens_cpu
    return int((forward_batch.seq_lens if lens is None else lens).max())


def _attention_types(model) -> set[AttentionType]:
    return {layer.attn_type for layer in model.modules() if isinstance(layer, RadixAttention)}


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
        if layer.is_cross_attention or layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            reasons.add("cross attention")
    if len(_attention_types(model_runner.model)) > 1:
        reasons.add("causal and bidirectional attention in one model")
    if AttentionType.ENCODER_ONLY in _attention_types(model_runner.model) and not model_runner.is_draft_worker:
        reasons.add("bidirectional attention")
    if reasons:
        raise ValueError(
            f"--attention-backend {ATTENTION_BACKEND} does not support this model, which uses "
            f"{', '.join(sorted(reasons))}; try --attention-backend torch_native without speculative decoding"
        )
