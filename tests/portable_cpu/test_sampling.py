"""Sampled verification on the CPU emits exactly the target's distribution."""

import pytest
import torch
from scipy import stats

from tetris_sglang.portable_cpu import sampling

SAMPLES = 40_000


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def verify(candidates, next_token, next_sibling, target_probs, depth, seed=0, **thresholds):
    bs, n = candidates.shape
    generator = torch.Generator().manual_seed(seed)
    predicts = torch.full((bs * n,), -1, dtype=torch.int32)
    accept_index = torch.full((bs, depth), -1, dtype=torch.int32)
    accept_num = torch.empty(bs, dtype=torch.int32)
    sampling.tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accept_num,
        candidates,
        torch.arange(bs * n).view(bs, n),
        next_token,
        next_sibling,
        torch.rand(bs, n, generator=generator),
        torch.rand(bs, generator=generator),
        target_probs,
        None,
        **thresholds,
    )
    return predicts.view(bs, n), accept_index, accept_num


def chain(n):
    return torch.tensor([list(range(1, n)) + [-1]]), torch.full((1, n), -1)


def expect_distribution(tokens, probs):
    """Chi-square of observed tokens against exact probabilities; a token of probability 0 must not occur."""
    observed = torch.bincount(tokens.long(), minlength=len(probs)).double()
    assert observed[probs == 0].sum() == 0
    keep = probs > 0
    expected = probs[keep].double()
    expected = expected / expected.sum() * observed.sum()
    assert stats.chisquare(observed[keep].numpy(), expected.numpy()).pvalue > 1e-4


PROBS = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.3])


@pytest.mark.parametrize("drafted", [0, 1, 2, 3])
def test_first_token_follows_the_target_whatever_was_drafted(drafted):
    next_token, next_sibling = chain(2)
    candidates = torch.tensor([[4, drafted]])
    predicts, _, accepted = verify(
        candidates.expand(SAMPLES, -1),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        PROBS.expand(SAMPLES, 2, -1),
        depth=2,
    )
    expect_distribution(predicts[:, 0], PROBS)
    rate = float(PROBS[drafted])
    assert abs(accepted.double().mean() - rate) < 5 * (rate * (1 - rate) / SAMPLES) ** 0.5 + 1e-9


def test_pairs_of_tokens_follow_the_target_along_a_chain():
    """The joint distribution of the first two tokens, over a chain of two drafts and their bonus."""
    vocab = 4
    generator = torch.Generator().manual_seed(3)
    first = torch.rand(vocab, generator=generator).softmax(-1)
    second = (2 * torch.rand(vocab, vocab, generator=generator)).softmax(-1)  # by first token
    drafted = torch.tensor([0, 2, 1])  # root, drafts
    rows = torch.stack((first, second[2], torch.full((vocab,), 0.25)))
    next_token, next_sibling = chain(3)
    predicts, index, accepted = verify(
        drafted.expand(SAMPLES, -1),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        rows.expand(SAMPLES, -1, -1),
        depth=3,
    )
    expect_distribution(predicts[:, 0], first)
    reached = accepted > 0
    expect_distribution(predicts[reached, 1], second[2])
    assert torch.equal(reached, predicts[:, 0] == 2)
    assert torch.equal(index[:, 1] >= 0, reached)


def test_siblings_share_one_coin_and_stay_exact():
    """Root with three children; the third's subtree is deeper."""
    next_token = torch.tensor([[1, -1, -1, 4, -1]])
    next_sibling = torch.tensor([[-1, 2, 3, -1, -1]])
    candidates = torch.tensor([[0, 3, 0, 1, 4]])
    predicts, index, accepted = verify(
        candidates.expand(SAMPLES, -1),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        PROBS.expand(SAMPLES, 5, -1),
        depth=3,
    )
    expect_distribution(predicts[:, 0], PROBS)
    for node, token in ((1, 3), (2, 0), (3, 1)):
        taken = index[:, 1] % 5 == node
        taken &= index[:, 1] >= 0
        assert torch.equal(taken, predicts[:, 0] == token)
    deep = (predicts[:, 0] == 1).nonzero()[:, 0]
    expect_distribution(predicts[deep, 3], PROBS)
    assert int(accepted.max()) == 2


def test_wrong_acceptance_is_noticed():
    """The chi-square above has the power to see an acceptance rule that favours the draft."""
    next_token, next_sibling = chain(2)
    predicts, _, _ = verify(
        torch.tensor([[4, 1]]).expand(SAMPLES, -1),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        PROBS.expand(SAMPLES, 2, -1),
        depth=2,
        threshold_acc=0.9,
    )
    with pytest.raises(AssertionError):
        expect_distribution(predicts[:, 0], PROBS)


def test_greedy_rows_in_a_sampled_batch_are_deterministic():
    """SGLang runs a greedy request beside sampled ones as top_k 1."""
    probs = sampling.top_k_renorm_prob(torch.rand(SAMPLES, 5).softmax(-1), torch.ones(SAMPLES, dtype=torch.int32))
    next_token, next_sibling = chain(2)
    best = probs.argmax(-1)
    predicts, _, accepted = verify(
        torch.stack((best, best), 1),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        probs[:, None].expand(-1, 2, -1),
        depth=2,
    )
    assert (accepted == 1).all() and torch.equal(predicts[:, 0].long(), best)


def test_draft_of_probability_zero_is_never_accepted():
    probs = torch.tensor([0.0, 1.0])
    next_token, next_sibling = chain(2)
    predicts, _, accepted = verify(
        torch.zeros(SAMPLES, 2, dtype=torch.long),
        next_token.expand(SAMPLES, -1),
        next_sibling.expand(SAMPLES, -1),
        probs.expand(SAMPLES, 2, -1),
        depth=2,
    )
    assert not accepted.any() and (predicts[:, 0] == 1).all()


@pytest.mark.parametrize("rows,vocab", [(1, 3), (5, 100)])
def test_filters_keep_what_sglangs_sampler_keeps(rows, vocab):
    """What survives top-k and top-p is what survives in the pytorch sampler, used without speculation."""
    generator = torch.Generator().manual_seed(rows)
    probs = (3 * torch.randn(rows, vocab, generator=generator)).softmax(-1)
    top_k = torch.randint(1, vocab + 1, (rows,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(rows, generator=generator) * 0.9 + 0.05
    by_k, by_p = sampling.top_k_renorm_prob(probs, top_k), sampling.top_p_renorm_prob(probs, top_p)
    for row in range(rows):
        ordered, token = probs[row].sort(descending=True)
        count = int(top_k[row])
        assert set(by_k[row].nonzero()[:, 0].tolist()) == set(token[:count].tolist())
        mass, kept = 0.0, []
        for p, t in zip(ordered.tolist(), token.tolist(), strict=True):
            if mass > float(top_p[row]):
                break
            kept.append(t)
            mass += p
        assert set(by_p[row].nonzero()[:, 0].tolist()) == set(kept)
        for filtered in (by_k[row], by_p[row]):
            torch.testing.assert_close(filtered.sum(), torch.tensor(1.0))
            survivors = filtered > 0
            ratio = filtered[survivors] / probs[row][survivors]
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_a_cpu_is_no_reason_to_be_greedy():
    def upstream(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling):
        return is_all_greedy or is_cpu

    others = {"is_hip": False, "is_xpu": False, "use_rejection_sampling": False}
    assert sampling.verify_by_request(upstream, is_all_greedy=False, is_cpu=True, **others) is False
    assert sampling.verify_by_request(upstream, is_all_greedy=True, is_cpu=True, **others) is True
