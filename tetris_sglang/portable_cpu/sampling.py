"""Lossless sampled verification in plain torch.

Upstream's CPU path turns every sampled request greedy; its GPU kernels are the reference for what these do.
"""

import torch
from torch import Tensor

from tetris_sglang.portable_cpu.operators import accepted_paths, first_of_family, tree_parents, write_paths


def verify_by_request(original, *, is_cpu: bool, **conditions) -> bool:
    """Around `eagle_utils._verify_uses_greedy`: a CPU is no reason to verify sampled requests greedily."""
    return original(is_cpu=False, **conditions)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep each row's `top_k` most likely tokens, renormalised; ties fall as in SGLang's pytorch sampler.

    Args:
        probs: [rows, vocab] float32. top_k: [rows] int, anything from the vocabulary's size on keeps all.
    """
    ordered, token = probs.sort(dim=-1, descending=True)
    ordered = torch.where(torch.arange(probs.shape[-1]) < top_k[:, None], ordered, 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.empty_like(probs).scatter_(-1, token, ordered)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most likely tokens until their mass reaches `top_p` [rows], renormalised."""
    ordered, token = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = torch.where(before <= top_p[:, None], ordered, 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.empty_like(probs).scatter_(-1, token, ordered)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafted tokens by the target's distribution alone; the first three arguments are written.

    At a node with children c1, c2, ... one coin u decides: the first child with u < p(c1) + ... + p(ci) is
    accepted, which draws it with probability p(ci). If none is, the token is drawn from the target's
    distribution without the children. Either way the emitted token follows the target's distribution exactly.

    Args:
        candidates: [bs, n] token of every node.
        uniform_samples: [bs, n] the coin of every node. uniform_samples_for_final_sampling: [bs].
        target_probs: [bs, n, vocab] filtered and normalised. draft_probs: not read.
    """
    bs, n = candidates.shape
    node, request = torch.arange(n), torch.arange(bs)
    parent = tree_parents(retrive_next_token, retrive_next_sibling)
    is_child = parent != node
    prob = target_probs[request[:, None], parent, candidates]
    prob = torch.where(is_child, prob, 0)
    family = (parent[:, :, None] == parent[:, None, :]) & (node <= node[:, None])
    mass = (family * prob[:, None]).sum(-1)  # of a node and its elder siblings
    coin = uniform_samples.gather(1, parent)
    passes = is_child & ((coin < mass / threshold_acc) | (prob >= threshold_single))
    accepted, level = accepted_paths(first_of_family(passes, parent), parent, accept_index.shape[1])
    write_paths(accept_index, accept_token_num, retrive_index, accepted, level)

    # The token after the last accepted node: the target's distribution there, less the refused children. In
    # float64 a coin below 1 stays below the total, so a token of probability 0 is never drawn.
    last = torch.where(accepted, level, -1).argmax(-1)
    refused = torch.where(is_child & (parent == last[:, None]), prob, 0).double()
    probs = target_probs[request, last]
    cdf = probs.double().scatter_add(1, candidates, -refused).clamp_(min=0).cumsum(-1)
    threshold = uniform_samples_for_final_sampling.double()[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, threshold, right=True)[:, 0]
    # Rounding can refuse children that hold all the mass; then the likeliest token is as good.
    drawn = torch.where(cdf[:, -1] > 0, drawn, probs.argmax(-1))

    following = torch.zeros(bs, n + 1, dtype=candidates.dtype)  # column n takes the refused nodes
    following.scatter_(1, torch.where(accepted & is_child, parent, n), candidates)
    following[request, last] = drawn
    rows = retrive_index.long()
    following = following[:, :n].to(predicts.dtype)
    predicts.view(-1)[rows] = torch.where(accepted, following, predicts.view(-1)[rows])
