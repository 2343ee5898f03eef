"""SGLang's own test kits for speculative servers, from its wheel, against a TETRIS server.

Not run: SpecAccuracyKit and SpecPerfKit need GSM8K; SpecPenaltyKit sends penalties, which TETRIS refuses by name;
SpecHiddenStatesKit and SpecSamplingMaskKit test features that TETRIS refuses by name.
"""

from __future__ import annotations

import unittest

import pytest
from sglang.test.kits.spec_server_kits import SpecCorrectnessKit, SpecLogprobKit, SpecParityKit

from tests.e2e.conftest import TARGET


class _OnOurServer(unittest.TestCase):
    """What the kits expect of upstream's server fixture."""

    model = str(TARGET)

    @classmethod
    def setUpClass(cls) -> None:
        pass

    @pytest.fixture(autouse=True)
    def _attach(self, plain, overlap):
        self.base_url = overlap.url
        self.plain = plain


class TestParity(SpecParityKit, _OnOurServer):
    @classmethod
    def setUpClass(cls) -> None:
        """Upstream starts a reference server here; ours is running already."""

    def test_parity_vs_reference(self):
        self.parity_ref_outputs = {
            prompt: self.plain.generate(prompt, max_new_tokens=48)["text"] for prompt in self.parity_prompts
        }
        super().test_parity_vs_reference()


class TestCorrectness(SpecCorrectnessKit, _OnOurServer):
    # Of the shipped 5 M parameter pair, on prompts unlike its training text.
    acc_length_thres = 1.5
    batch_accept_len_thres = 1.3

    @property
    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(TARGET)


class TestLogprobs(SpecLogprobKit, _OnOurServer):
    # float32 here; upstream's 0.5 is for bfloat16.
    logprob_match_delta = 5e-3
