"""SGLang's own test kits for speculative servers, from its wheel, against a TETRIS server of every kind.

Not run: SpecAccuracyKit and SpecPerfKit need GSM8K; SpecPenaltyKit looks for crashes alone, test_greedy_parity compares;
SpecHiddenStatesKit and SpecSamplingMaskKit test features that TETRIS refuses by name.
"""

from __future__ import annotations

import unittest

import pytest
from sglang.test.kits.spec_server_kits import SpecCorrectnessKit, SpecLogprobKit, SpecParityKit
from transformers import AutoTokenizer

from tests.e2e.conftest import SWITCHING, TARGET


class _Kit(unittest.TestCase):
    __test__ = False
    """pytest collects every TestCase by itself, without a server; test_upstreams_kit runs these."""


class _Parity(SpecParityKit, _Kit):
    @classmethod
    def setUpClass(cls) -> None:
        """Upstream starts a reference server here; ours is running already."""


class _Correctness(SpecCorrectnessKit, _Kit):
    # Of the shipped drafts, on prompts unlike their training text.
    acc_length_thres = 1.3
    batch_accept_len_thres = 1.1
    tokenizer = AutoTokenizer.from_pretrained(TARGET)


class _Logprobs(SpecLogprobKit, _Kit):
    # float32 here; upstream's 0.5 is for bfloat16.
    logprob_match_delta = 5e-3


LONG = (
    "test_acc_length",
    "test_eos_token",
    "test_logprob_decode_match_prefill",
    "test_logprob_match",
    "test_logprob_mixed",
)


@pytest.fixture
def answers(plain) -> dict[str, str]:
    """What the kits compare with."""
    return {prompt: plain.generate(prompt, max_new_tokens=48)["text"] for prompt in SpecParityKit.parity_prompts}


@pytest.mark.parametrize(
    ("kit", "method"),
    [
        pytest.param(kit, method, id=method)
        for kit in (_Parity, _Correctness, _Logprobs)
        for method in unittest.TestLoader().getTestCaseNames(kit)
    ],
)
def test_upstreams_kit(featured, answers, kit, method, request):
    if method in LONG and request.node.callspec.params["tetris"] not in ("overlap", "comb"):
        pytest.skip("it generates for half a minute; chains and combs have it, and test_greedy_parity this draft")
    case = kit(method)
    if request.node.callspec.params["tetris"] in SWITCHING:
        # Steps that chance makes plain ones emit one token.
        case.batch_accept_len_thres = 1.0
    case.base_url, case.parity_ref_outputs = featured.url, answers
    getattr(case, method)()
