"""The kernels of SGLang's own speculation. Those that exist in Triton, too, for the platform XPU, are computed by that."""

from __future__ import annotations

import torch
from torch import Tensor


def build_tree_kernel_efficient(
    parents: Tensor, selected: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor, index: Tensor,
    next_token: Tensor, next_sibling: Tensor, topk: int, depth: int, num_tokens: int, mask_mode: int,
) -> None:  # fmt: skip
    """Args: as of the function of this name in sglang/kernels/ops/speculative/tree.py."""
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    octets = tree_mask.view(torch.uint8)
    sgl_build_tree_kernel_triton(
        parents, selected, seq_lens, octets, positions, index, next_token, next_sibling, topk, depth, num_tokens, mask_mode
    )


def verify_tree_greedy(*args: Tensor) -> None:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(*args)


def reconstruct_indices_from_tree_mask(tree_mask: Tensor, *args: Tensor | int) -> None:
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_triton

    reconstruct_indices_from_tree_mask_triton(tree_mask.view(torch.uint8), *args)


def sample(
    predicts: Tensor, accept_index: Tensor, num_accepted: Tensor, candidates: Tensor, index: Tensor, next_token: Tensor,
    next_sibling: Tensor, coins: Tensor, final_coins: Tensor, target_probs: Tensor, draft_probs: Tensor,
    threshold_single: float, threshold_acc: float,
) -> None:  # fmt: skip
    """One token of the target per node on the accepted path, by inverting its distribution: first the children's share of it.

    Args:
        predicts: [requests * nodes], written where the path passes.
        accept_index: [requests, depth], written: the path's nodes over the whole batch.
        num_accepted: [requests], written.
        candidates, index, next_token, next_sibling: [requests, nodes], the trees.
        coins, final_coins: [requests, nodes] and [requests], uniform.
        target_probs, draft_probs: [requests, nodes, vocab]; the second, 0 at first, takes the refused children's share.

    Source: sglang/kernels/jit/include/sgl_kernel/speculative/sampling.cuh.
    """
    depth = accept_index.shape[1]
    for request in range(len(candidates)):
        last, node, row, count = int(index[request, 0]), 0, 0, 0
        accept_index[request, 0] = last
        while count < depth - 1:
            node, share, coin = int(next_token[request, node]), 0.0, float(coins[request, row])
            while node != -1:
                token = int(candidates[request, node])
                prob = float(target_probs[request, row, token])
                share += prob
                if prob > 0 and (coin < share / max(threshold_acc, 1e-9) or prob >= threshold_single):
                    break
                draft_probs[request, row, token] = prob
                node = int(next_sibling[request, node])
            if node == -1:
                break
            predicts[last], last, row, count = token, int(index[request, node]), node, count + 1
            accept_index[request, count] = last
        num_accepted[request] = count
        rest = target_probs[request, row].double()
        if count < depth - 1:
            rest = (rest - draft_probs[request, row].double()).clamp(min=0)
        above = (rest.cumsum(dim=0) > float(final_coins[request]) * rest.sum()).nonzero()
        predicts[last] = above[0, 0] if len(above) else rest.nonzero()[-1, 0]
