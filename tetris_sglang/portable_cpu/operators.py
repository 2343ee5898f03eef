"""Plain-torch versions of the `sgl_kernel` CPU operators that SGLang's scheduler and EAGLE path call.

Each function has the name, parameters and in-place contract of the operator it stands for; the Triton kernels
under `sglang/kernels/ops` are the reference for what it computes. Nothing here loops over requests or tokens.

Shapes: `bs` requests, `n` nodes of a draft tree (the root included), `depth` the longest accepted path.
"""

import importlib
import importlib.machinery
import sys
import types
from ctypes import c_uint8

import numpy as np
import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------
# request-to-token table


def _span_indices(req_pool_indices: Tensor, start: Tensor, end: Tensor, pool_len: int) -> np.ndarray:
    """Flat table positions of columns [start, end) of every request's row, request after request."""
    # In numpy, whose calls take a third of torch's; torch's repeat wakes every thread besides (docs/lessons.md).
    first_columns = start.numpy().astype(np.int64)
    lens = end.numpy() - first_columns
    total = lens.cumsum()
    # Position p of the packed output lies in request b, p - (total[b] - lens[b]) columns after start[b].
    first = req_pool_indices.numpy().astype(np.int64) * pool_len + first_columns - (total - lens)
    first = first.repeat(lens)
    return first + np.arange(len(first))


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the packed slots into columns [start, end) of each request's row."""
    index = _span_indices(req_pool_indices, start_offset, end_offset, pool_len)
    req_to_token.view(-1).numpy()[index] = out_cache_loc[: len(index)].numpy()


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read columns [start, end) of each request's row into the packed slots."""
    index = _span_indices(req_pool_indices, start_offset, end_offset, pool_len)
    out_cache_loc[: len(index)] = torch.from_numpy(req_to_token.view(-1).numpy()[index])


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` columns after each request's length into `out_cache_loc`."""
    first = req_pool_indices.long() * pool_len + seq_lens
    index = first[:, None] + torch.arange(topk * num_steps)
    out_cache_loc[: index.numel()] = req_to_token.view(-1)[index.view(-1)]


# ---------------------------------------------------------------------------------------------------------
# draft trees


def _self_and_ancestors(parent: Tensor) -> Tensor:
    """[bs, n, n] bool: node j lies on the path from node i up to its root, i itself included.

    Args:
        parent: [bs, n] int64, each node's parent; a root (or a detached node) is its own parent.
    """
    n = parent.shape[1]
    reach = torch.eye(n, dtype=torch.bool).expand(parent.shape[0], n, n)
    hop = parent
    # After k rounds `reach` covers paths of 2**k nodes: pointer jumping instead of a walk.
    for _ in range((n - 1).bit_length()):
        reach = reach | reach.gather(1, hop[:, :, None].expand(-1, -1, n))
        hop = hop.gather(1, hop)
    return reach


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links, positions and attention mask of the draft trees; see `kernels/ops/speculative/spec_tree.py`.

    Raises:
        NotImplementedError: `tree_mask_mode` is the bit-packed one, which no CPU attention backend reads.
    """
    bs, n = verified_seq_len.shape[0], draft_token_num
    node = torch.arange(n)
    seq_lens = verified_seq_len.long()
    retrive_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    next_token, next_sibling = retrive_next_token.view(bs, n), retrive_next_sibling.view(bs, n)

    if topk == 1:  # a chain
        next_token[:, :-1] = node[1:]
        next_token[:, -1] = -1
        next_sibling.fill_(-1)
        depths = node.expand(bs, n)
        visible = (node <= node[:, None]).expand(bs, n, n)
    else:
        selected = selected_index.long()
        table_row = selected // topk
        if parent_list.numel():
            parent_token = parent_list.long().gather(1, table_row)
            matches = selected[:, None, :] == parent_token[:, :, None]
            found = matches.any(-1)
            parent = torch.where(found, matches.int().argmax(-1) + 1, -1)
        else:
            parent = torch.full_like(selected, -1)
        parent = torch.where(table_row == 0, 0, parent)  # [bs, n - 1], parents of nodes 1..n-1
        parent = torch.cat((torch.full((bs, 1), -1), parent), dim=1)

        is_child = parent[:, None, :] == node[:, None]  # [bs, parent, child]
        first_child = torch.where(is_child, node, n).amin(-1)
        next_token.copy_(torch.where(first_child < n, first_child, -1))
        later_twin = (parent[:, :, None] == parent[:, None, :]) & (node > node[:, None])
        later_twin &= (parent >= 0)[:, :, None]
        sibling = torch.where(later_twin, node, n).amin(-1)
        next_sibling.copy_(torch.where(sibling < n, sibling, -1))

        visible = _self_and_ancestors(torch.where(parent < 0, node, parent))
        depths = visible[:, :, 1:].sum(-1)
        visible = visible.clone()
        visible[:, :, 0] = True
    positions.view(bs, n).copy_(seq_lens[:, None] + depths)

    if tree_mask_mode == 1:  # QLEN_ONLY: n x n per request
        tree_mask.view(-1)[: bs * n * n].view(bs, n, n).copy_(visible)
    elif tree_mask_mode == 0:  # FULL_MASK: n x (seq_len + n) per request, the prefix part filled by the caller
        before = n * (seq_lens.cumsum(0) - seq_lens) + n * n * torch.arange(bs)
        row = before[:, None] + (seq_lens[:, None] + n) * node + seq_lens[:, None]
        tree_mask.view(-1)[(row[:, :, None] + node).view(-1)] = visible.reshape(-1)
    else:
        raise NotImplementedError(f"build_tree_kernel_efficient_cpu: tree_mask_mode {tree_mask_mode} is not supported")


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Links and positions back from an `[bs, n, n]` tree mask (n-gram speculation builds trees this way)."""
    bs, n = batch_size, draft_token_num
    node = torch.arange(n)
    ancestor = tree_mask.view(bs, n, n).bool() & (node < node[:, None])
    positions.view(bs, n).copy_(ancestor.sum(-1) + verified_seq_len.view(bs, 1))
    retrive_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    parent = torch.where(ancestor, node, -1).amax(-1)
    child = torch.where(ancestor, node[:, None], n).amin(1)
    retrive_next_token.view(bs, n).copy_(torch.where(child < n, child, -1))
    later_twin = (parent[:, :, None] == parent[:, None, :]) & (node > node[:, None]) & (parent >= 0)[:, :, None]
    sibling = torch.where(later_twin, node, n).amin(-1)
    retrive_next_sibling.view(bs, n).copy_(torch.where(sibling < n, sibling, -1))


def tree_parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """[bs, n] int64 parent of each node from the first-child and next-sibling links; roots and detached nodes
    are their own parent."""
    bs, n = next_token.shape
    node = torch.arange(n).expand(bs, n)
    spare = torch.full((bs, n + 1), n)  # column n takes the writes of absent links

    def invert(links: Tensor) -> Tensor:
        target = torch.where(links < 0, n, links.long())
        return spare.scatter(1, target, node)[:, :n]

    parent_of_first, previous = invert(next_token), invert(next_sibling)
    eldest = torch.where(previous < n, previous, node)
    for _ in range((n - 1).bit_length()):
        eldest = eldest.gather(1, eldest)
    parent = parent_of_first.gather(1, eldest)
    return torch.where(parent < n, parent, node)


def accepted_paths(passes: Tensor, parent: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The nodes accepted from the root down.

    Args:
        passes: [bs, n] bool, whether a node passes once its parent is accepted; at most one of a family does.
        parent: [bs, n] int64 from `tree_parents`.
        depth: the most nodes an accepted path may hold, the root included.
    Returns:
        accepted: [bs, n] bool, the root always. level: [bs, n] int64, 0 for the root.
    """
    node = torch.arange(passes.shape[1])
    path = _self_and_ancestors(parent)
    level = path.sum(-1) - 1
    passes = (passes & (parent != node)) | (node == 0)  # a detached node never passes
    accepted = (path <= passes[:, None]).all(-1) & (level < depth)
    return accepted, level


def write_paths(accept_index: Tensor, accept_token_num: Tensor, retrive_index: Tensor, accepted: Tensor, level: Tensor) -> None:
    """Write `accept_index` [bs, depth] (row numbers by level, -1 after the path) and `accept_token_num` [bs]
    (accepted nodes, the root not counted) in place."""
    bs, depth = accept_index.shape
    index = torch.full((bs, depth + 1), -1, dtype=accept_index.dtype)  # the last column takes the refused nodes
    index.scatter_(1, torch.where(accepted, level, depth), retrive_index.to(index.dtype))
    accept_index.copy_(index[:, :depth])
    accept_token_num.copy_(accepted.sum(-1) - 1)


def first_of_family(passes: Tensor, parent: Tensor) -> Tensor:
    """[bs, n] bool: `passes`, less the nodes with an elder sibling (smaller number) that passes too."""
    node = torch.arange(passes.shape[1])
    elder = (parent[:, :, None] == parent[:, None, :]) & (node < node[:, None]) & (node > 0)
    return passes & ~(elder & passes[:, None]).any(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept, from the root down, the child that carries the target's greedy token."""
    bs, n = candidates.shape
    parent = tree_parents(retrive_next_token, retrive_next_sibling)
    target = target_predict.view(bs, n)
    passes = first_of_family(candidates == target.gather(1, parent), parent)
    accepted, level = accepted_paths(passes, parent, accept_index.shape[1])
    write_paths(accept_index, accept_token_num, retrive_index, accepted, level)
    # An accepted node is followed by the target's token: its accepted child, or the bonus token.
    rows = retrive_index.long()
    predicts.view(-1)[rows] = torch.where(accepted, target.to(predicts.dtype), predicts.view(-1)[rows])


# ---------------------------------------------------------------------------------------------------------
# bookkeeping after verification


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """`bonus_tokens[b]` = the last of request b's `accept_lens[b]` accepted tokens."""
    bs = accept_lens.shape[0]
    last = torch.arange(0, bs * accept_stride, accept_stride) + accept_lens - 1
    bonus_tokens[:bs] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the slots of the accepted nodes (entries of `accept_index` other than -1)."""
    accepted = accept_index.view(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy cache rows `src_loc` to `tgt_loc` in every layer's buffers, given by address and bytes per row."""
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):  # over layers
        memory = (c_uint8 * (rows * row_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
        buffer[target] = buffer[source]  # the gather is a copy, so the ranges may overlap


# ---------------------------------------------------------------------------------------------------------
# Triton kernels without a CPU branch upstream


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows `indices` of the speculative relay buffers (`kernels/ops/speculative/gather_spec_extras.py`)."""
    hidden_states = None if hidden_states_buf is None else hidden_states_buf.index_select(0, indices)
    return (
        topk_p_buf.index_select(0, indices),
        topk_index_buf.index_select(0, indices),
        output_tokens_buf.index_select(0, indices),
        hidden_states,
    )


def table_qk_norm_rope_(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Norms and turns queries and keys in place, as DFlash drafts in bfloat16 want it
    (`kernels/ops/attention/table_qk_norm_rope.py`).

    Args:
        qkv: [rows, heads of queries, keys and values, one behind the other]. positions: [rows].
        cos_sin_cache: [max positions, head_dim], the cosines first.
    """
    num_heads = num_q_heads + num_k_heads
    heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    weights = torch.cat((q_weight.expand(num_q_heads, -1), k_weight.expand(num_k_heads, -1))).float()
    values = heads.float()
    scale = (values.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    first, second = (values * scale * weights).to(qkv.dtype).float().chunk(2, dim=-1)
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def get_last_loc(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """[bs] cache row of each request's last prefix token, or -1 (`srt/mem_cache/allocation.py`)."""
    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
    return torch.where(prefix_lens_tensor > 0, last, -1).to(prefix_lens_tensor.dtype)


# ---------------------------------------------------------------------------------------------------------
# the module that stands in for `sgl_kernel`

OPERATORS = (
    assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
    fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu,
    copy_all_layer_kv_cache_cpu,
    reconstruct_indices_from_tree_mask,
)

# Imported by SGLang at module level on a CPU, called only on paths that this platform does not serve.
UNSUPPORTED = {
    "rotate_input_ids_cpu": "multi-layer EAGLE",
    "build_draft_decode_metadata_cpu": "--attention-backend intel_amx",
}

MODULES = ("sgl_kernel", "sgl_kernel.speculative", "sgl_kernel.kvcacheio")


def native_operators_exist() -> bool:
    """Whether an installed `sgl_kernel` brings the CPU operators itself (its CPU builds do)."""
    return _load_sgl_kernel() and hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu")


def install() -> None:
    """Make `from sgl_kernel import ..._cpu` give the operators above. Idempotent."""
    if not _load_sgl_kernel():
        for name in MODULES:
            sys.modules[name] = _StandIn(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    for name in MODULES:
        module = importlib.import_module(name)
        for operator in OPERATORS:
            setattr(module, operator.__name__, operator)
        for operator_name, feature in UNSUPPORTED.items():
            setattr(module, operator_name, _unsupported(operator_name, feature))


def _load_sgl_kernel() -> bool:
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError):  # the CUDA build, without the driver's libraries
        for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
        return False
    return True


class _StandIn(types.ModuleType):
    """An empty package under the name of one that does not load here."""

    def __init__(self, name: str):
        super().__init__(name, "Stands in for sgl_kernel on a machine where it does not load.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        self.__version__ = "0.0.0+tetris"


def _unsupported(name: str, feature: str):
    def operator(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} ({feature}) is not available on the portable CPU platform")

    operator.__name__ = name
    return operator
