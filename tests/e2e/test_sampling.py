"""Sampled output is distributed exactly as the target's: servers against exact probabilities."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.client import Client
from tests.e2e.conftest import ARGUMENTS, FORKED, TARGET
from tests.e2e.plugins import BROKEN_ACCEPTANCE, write_plugin
from tetris_sglang.tools.server_process import ServerProcess

NUM_TOKENS = 4
NUM_SAMPLES = 900
# Of the drafts verified at temperature 1. Their most likely tokens, without the noise, reach 0.13, 0.34, 0.14, 0.12, 0.09 and
# 0.08.
MIN_SAMPLED_SUCCESS = {
    "overlap": 0.35, "synchronous": 0.42, "comb": 0.25, "eagle": 0.28, "eagle3": 0.14, "mtp": 0.12,
}  # fmt: skip
# The filters overlap, so their order shows: upstream's verify renormalises after top-k and then applies top-p.
PARAMS = {"temperature": 1.4, "top_k": 4, "top_p": 0.55, "min_p": 0.02}


def filter_probs(logits: torch.Tensor) -> torch.Tensor:
    """SGLang's joint filter (layers/sampler.py): top-p is measured on the unfiltered distribution."""
    probs, order = torch.softmax(logits.double() / PARAMS["temperature"], dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    keep = (torch.arange(probs.shape[-1]) < PARAMS["top_k"]) & (before <= PARAMS["top_p"])
    keep &= probs >= probs[..., :1] * PARAMS["min_p"]
    kept = torch.where(keep, probs, 0.0)
    return torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


@pytest.fixture(scope="module")
def prompt_ids(prompts) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return tokenizer.encode(next(p["text"] for p in prompts if p["kind"] == "prose" and len(p["text"]) > 120))


@pytest.fixture(scope="module")
def exact(prompt_ids) -> dict[tuple[int, ...], float]:
    """Probability of every possible run of NUM_TOKENS tokens."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    runs = {(): 1.0}
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + list(run) for run in runs])).logits[:, -1]
        probs = filter_probs(logits)
        runs = {
            (*run, token): probability * probs[row, token].item()
            for row, (run, probability) in enumerate(runs.items())
            for token in probs[row].nonzero().flatten().tolist()
        }
    assert sum(runs.values()) == pytest.approx(1.0)
    assert len(runs) > 10, "the prompt leaves too little to chance"
    return runs


def draw(client: Client, prompt_ids: list[int]) -> Counter:
    outputs = client.generate_all(
        [prompt_ids] * (NUM_SAMPLES // 60),
        concurrency=4,
        n=60,
        max_new_tokens=NUM_TOKENS,
        ignore_eos=True,
        **PARAMS,
    )
    return Counter(tuple(sample["output_ids"]) for sample in itertools.chain.from_iterable(outputs))


def p_value(counts: Counter, exact: dict) -> float:
    """Chi-square goodness of fit; cells expected fewer than 5 times are pooled. Impossible runs give 0."""
    if set(counts) - set(exact):
        return 0.0
    total = counts.total()
    large = [run for run, probability in exact.items() if probability * total >= 5]
    expected = [exact[run] * total for run in large]
    observed = [counts[run] for run in large]
    rest = total - sum(expected)
    if rest > 1e-6:
        expected.append(rest)
        observed.append(total - sum(observed))
    return scipy.stats.chisquare(observed, expected).pvalue


def test_the_measure_accepts_the_server_without_speculation(plain, prompt_ids, exact):
    assert p_value(draw(plain, prompt_ids), exact) > 1e-4


def test_sampled_output_has_the_targets_distribution(tetris, prompt_ids, exact):
    before = tetris.tetris_state()["accepted_tokens"]
    assert p_value(draw(tetris, prompt_ids), exact) > 1e-4
    # n-grams find little in four sampled tokens.
    assert tetris.tetris_state()["accepted_tokens"] > before + 10, "nothing was accepted: nothing was tested"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_have_the_targets_distribution(servers, plain, rule, prompt_ids, exact, mixed_prompts):
    """Their drafts come from the draft's own law. Greedy requests beside sampled ones stay greedy."""
    (server,) = servers.get(rule)
    before = server.tetris_state()
    assert p_value(draw(server, prompt_ids), exact) > 1e-4
    after = server.tetris_state()
    accepted, selected = (after[f"{n}_tokens"] - before[f"{n}_tokens"] for n in ("accepted", "selected"))
    assert accepted > 0.05 * selected > 10, "next to nothing was accepted: nothing was tested"
    each = [{} if i % 2 else PARAMS for i in range(16)]
    expected = plain.generate_all(mixed_prompts[:16], max_new_tokens=40)
    actual = server.generate_all(mixed_prompts[:16], each=each, max_new_tokens=40)
    assert [o["text"] for o in actual[1::2]] == [o["text"] for o in expected[1::2]]
    servers.stop_one(rule)


def test_the_measure_rejects_broken_acceptance(prompt_ids, exact, tmp_path):
    """The same server, with every selected draft accepted by a third plugin, fails the same test."""
    environment = write_plugin(tmp_path, "broken_acceptance", BROKEN_ACCEPTANCE)
    log_path = tmp_path / "broken.log"
    options = {"environment": environment, "entry_point": FORKED, "start_timeout_s": 400}
    with ServerProcess(ARGUMENTS["overlap"], log_path, **options) as server:
        assert p_value(draw(Client(server.url, log_path), prompt_ids), exact) < 1e-6


def test_a_seed_decides_the_text(tetris, mixed_prompts):
    """Whether and what is drafted shows nowhere: seeded texts are those that the same server writes without speculation."""
    prompts = mixed_prompts[:16]
    seeded = [{**(PARAMS if i % 2 else {"temperature": 1}), "sampling_seed": i} for i in range(16)]
    opted_out = [{**params, "custom_params": {"tetris": {"speculate": False}}} for params in seeded]
    accepted = tetris.tetris_state()["accepted_tokens"]
    drafted = tetris.generate_all(prompts, each=seeded, max_new_tokens=48, ignore_eos=True)
    assert tetris.tetris_state()["accepted_tokens"] > accepted + 10, "nothing was accepted: nothing was tested"
    # In another company, too.
    alone = tetris.generate_all(prompts, concurrency=3, each=opted_out, max_new_tokens=48, ignore_eos=True)
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(drafted, alone, strict=True))
    assert same >= 15, "more than a near-tie: passes of unlike shapes round differently"
    other = [{**params, "sampling_seed": 100} for params in seeded]
    others = tetris.generate_all(prompts, each=other, max_new_tokens=48, ignore_eos=True)
    assert all(a["output_ids"] != b["output_ids"] for a, b in zip(drafted, others, strict=True))


def test_samples_of_one_seeded_request_differ(overlap, mixed_prompts):
    samples = overlap.generate(mixed_prompts[0], temperature=1, n=3, sampling_seed=5, max_new_tokens=24)
    assert len({sample["text"] for sample in samples}) == 3


def test_mixed_batches_keep_greedy_requests_greedy(plain, featured, mixed_prompts):
    """Greedy and sampled requests in one batch: the greedy ones give the greedy text."""
    each = [{} if i % 2 else PARAMS for i in range(16)]
    expected = plain.generate_all(mixed_prompts[:16], max_new_tokens=40)
    actual = featured.generate_all(mixed_prompts[:16], each=each, max_new_tokens=40)
    assert [o["text"] for o in actual[1::2]] == [o["text"] for o in expected[1::2]]
    assert [o["text"] for o in actual[::2]] != [o["text"] for o in expected[::2]]


def test_sampled_drafts_meet_sampled_targets(tetris, mixed_prompts, request):
    """Each kind of draft draws with the target's noise, heads with shortened vocabularies, too."""
    name = request.node.callspec.params["tetris"]
    if name not in MIN_SAMPLED_SUCCESS:
        pytest.skip("n-grams draw nothing: they look texts up")
    before = tetris.tetris_state()
    tetris.generate_all(mixed_prompts[:16], temperature=1, max_new_tokens=64, ignore_eos=True)
    after = tetris.tetris_state()
    accepted, selected = (after[f"{n}_tokens"] - before[f"{n}_tokens"] for n in ("accepted", "selected"))
    assert selected > 50
    assert accepted > MIN_SAMPLED_SUCCESS[name] * selected
