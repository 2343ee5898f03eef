"""Shared noise: its distribution, what it draws, and how often a draft meets its target."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare, kstest

from tetris_sglang.acceptance.noise import RequestNoise, draw, exponentials, perturb
from tetris_sglang.runtime.requests.seeds import RequestSeeds, install_sampler, request_noise

ROWS = 20_000
HOLDS = 1e-4


def make_seeds(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)


@pytest.mark.parametrize("varied", ["seeds", "positions", "tokens"])
def test_noise_is_exponential_whichever_of_its_keys_varies(varied):
    """Neighbours among positions, tokens and seeds included."""
    count = torch.arange(ROWS)
    one = torch.tensor([12345])
    seeds, positions, tokens = {
        "seeds": (count, torch.tensor([70]).expand(ROWS), one),
        "positions": (one.expand(ROWS), count, one),
        "tokens": (one, torch.tensor([70]), count),
    }[varied]
    values = exponentials(seeds, positions, tokens).flatten()
    assert kstest(values.numpy(), "expon").pvalue > HOLDS
    # Of neighbours, in their ranks: a deviation is 1 / sqrt(ROWS).
    ranks = torch.exp(-values)
    correlation = torch.corrcoef(torch.stack((ranks[1:], ranks[:-1])))[0, 1]
    assert abs(correlation) < 4 / ROWS**0.5


def test_the_winners_arrival_is_exponential_too():
    """The smallest of n, times n: what is drawn hangs on the small ones, whose last places a float could lose."""
    generator = torch.Generator().manual_seed(0)
    least = exponentials(make_seeds(2000, generator), torch.arange(2000), torch.arange(2048)).amin(dim=1)
    assert kstest((2048 * least).numpy(), "expon").pvalue > HOLDS


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, positions = torch.tensor([1, 2, 1, 1]), torch.tensor([5, 5, 6, 5])
    tokens = torch.tensor([0, 7, 31_999, 7])
    values = exponentials(seeds, positions, tokens)
    assert torch.equal(values[0], values[3]) and torch.equal(values[:, 1], values[:, 3])
    assert len(values[:3, :3].unique()) == 9
    assert torch.equal(exponentials(seeds, positions, tokens[1:2]), values[:, 1:2])


@pytest.mark.parametrize("position", [0, 900])
def test_tokens_are_drawn_with_their_weights(position):
    weights = torch.tensor([0.5, 0.0, 3.0, 1e-3, 0.2, 0.8])
    generator = torch.Generator().manual_seed(position)
    tokens = draw(
        weights.expand(ROWS, -1),
        make_seeds(ROWS, generator),
        torch.full((ROWS,), position, dtype=torch.int64),
    )
    counts = tokens.bincount(minlength=6)
    assert counts[1] == 0
    expected = weights / weights.sum() * ROWS
    drawable = weights > 0
    assert chisquare(counts[drawable].numpy(), expected[drawable].double().numpy(), sum_check=False).pvalue > HOLDS


def test_a_draft_meets_its_target_as_often_as_shared_arrivals_say():
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2, 40, generator=generator)
    temperature = 0.8
    noise = RequestNoise(make_seeds(ROWS, generator), torch.full((ROWS,), temperature))
    positions = torch.arange(ROWS)
    p, q = torch.softmax(logits.double() / temperature, dim=1)
    drafted = perturb(logits[1].expand(ROWS, -1), noise, positions).argmax(dim=1)
    target = draw(p.expand(ROWS, -1), noise.seeds, positions)
    # P(both are t) = 1 / sum_s max(p_s / p_t, q_s / q_t), arXiv:2408.07978.
    share = (1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(dim=1)).sum().item()
    met = (drafted == target).double().mean().item()
    assert met == pytest.approx(share, abs=4 * 0.5 / ROWS**0.5)
    # Far more than by chance, or with the draft's most likely token.
    assert share > 1.5 * max((p * q).sum().item(), p[q.argmax()].item())
    # The same draft is the target's own where the two agree.
    same = perturb(logits[0].expand(ROWS, -1), noise, positions).argmax(dim=1)
    assert (same == target).double().mean() > 0.999


def test_greedy_rows_and_shortened_vocabularies():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 50, generator=generator)
    noise = RequestNoise(torch.tensor([9, 9]), torch.tensor([0.0, 1.0]))
    positions = torch.tensor([4, 4])
    perturbed = perturb(logits, noise, positions)
    assert torch.equal(perturbed[0], logits[0]) and not torch.equal(perturbed[1], logits[1])
    token_ids = torch.tensor([40, 3, 17])
    assert torch.equal(perturb(logits[:, token_ids], noise, positions, token_ids), perturbed[:, token_ids])


# -- the running requests' seeds -----------------------------------------------------------------------------------


class Req:
    """What stands for SGLang's."""

    def __init__(self, sampling_seed: int | None = None, n: int = 1) -> None:
        self.sampling_params = SimpleNamespace(sampling_seed=sampling_seed, n=n)


def make_batch(rows: list[int], *, is_all_greedy: bool = False) -> SimpleNamespace:
    info = SimpleNamespace(is_all_greedy=is_all_greedy, sampling_seed=None)
    return SimpleNamespace(req_pool_indices=torch.tensor(rows), sampling_info=info)


def seeds_of(seeds: RequestSeeds, rows: list[int]) -> list[int]:
    batch = make_batch(rows)
    seeds.give(batch)
    return batch.sampling_info.sampling_seed.tolist()


def test_a_request_keeps_its_seed_wherever_it_goes():
    seeds = RequestSeeds(6, 7, None, "cpu")
    first, second, third = Req(), Req(), Req()
    seeds.add_prefilled([first, second], torch.tensor([4, 1]))
    given = seeds_of(seeds, [1, 4])
    assert len(set(given)) == 2 and 0 not in given
    # Another request takes a slot over; the first one comes back in yet another.
    seeds.add_prefilled([third, first], torch.tensor([4, 2]))
    assert seeds_of(seeds, [1, 2]) == given and seeds_of(seeds, [4])[0] not in given
    gone = weakref.ref(third)
    del third
    assert gone() is None, "a finished request is held on to"


def test_a_request_chooses_its_seed():
    first, second = (RequestSeeds(5, random_seed, None, "cpu") for random_seed in (7, 8))
    for seeds in (first, second):
        reqs = [Req(42), Req(0), Req(-(2**63)), Req(42, n=2), Req(42, n=2)]
        seeds.add_prefilled(reqs, torch.arange(5))
        given = seeds_of(seeds, [0, 1, 2, 3, 4])
        assert given[:3] == [42, 0, -(2**63)] and len(set(given)) == 5
    # Those that choose none do not depend on who else does.
    one, other = Req(), Req()
    first.add_prefilled([one], torch.tensor([0]))
    second = RequestSeeds(5, 7, None, "cpu")
    second.add_prefilled([Req(), Req(1), Req(2), Req(n=2), Req(n=2), other], torch.arange(6) % 5)
    assert seeds_of(first, [0]) == seeds_of(second, [0])


def test_seeds_follow_the_servers():
    def draw_some(random_seed: int, replica: int | None = None) -> list[int]:
        seeds = RequestSeeds(3, random_seed, replica, "cpu")
        seeds.add_prefilled([Req(), Req()], torch.tensor([0, 2]))
        return seeds_of(seeds, [0, 2])

    # Ranks draw the same; servers that start alike, too. Replicas do not: equal requests would get equal texts.
    assert draw_some(7) == draw_some(7) != draw_some(8)
    assert draw_some(7, 0) == draw_some(7, 0) != draw_some(7, 1)


def test_seeds_of_chance_are_refused():
    """Each rank would have its own. ServerArgs.random_seed is None where nobody gave one."""
    with pytest.raises(ValueError, match="random_seed=None"):
        RequestSeeds(3, None, None, "cpu")


def test_greedy_batches_get_no_seeds():
    batch = make_batch([0, 1], is_all_greedy=True)
    RequestSeeds(2, 7, None, "cpu").give(batch)
    assert batch.sampling_info.sampling_seed is None and request_noise(batch.sampling_info) is None


def test_greedy_requests_among_others_draw_without_noise():
    info = SimpleNamespace(
        sampling_seed=torch.tensor([5, 6, 7]),
        top_ks=torch.tensor([1, 2**30, 40], dtype=torch.int32),
        temperatures=torch.tensor([[1.0], [0.7], [1.5]]),
    )
    noise = request_noise(info)
    assert noise.seeds.tolist() == [5, 6, 7]
    torch.testing.assert_close(noise.scales, torch.tensor([0.0, 0.7, 1.5]))


def test_another_sampler_is_refused():
    runner = SimpleNamespace(sampler=torch.nn.Identity())
    with pytest.raises(RuntimeError, match=r"brought Identity. Remove the plugin"):
        install_sampler(runner, draw)
