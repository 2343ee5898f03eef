"""What a draft loses and what of it is accepted, on the tests' pair, against plain counting."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tools.distill.serving import serve
from tetris_sglang.tools.distill.corpus import Text, pad
from tetris_sglang.tools.distill.divergence import forward_kl
from tetris_sglang.tools.distill.head_files import BLOCKS, HEADS
from tetris_sglang.tools.distill.heads import Head
from tetris_sglang.tools.distill.lesson import STEP_DECAY, Lesson, judge, walk
from tetris_sglang.tools.distill.students import Teacher, load_student

PAIR = Path(__file__).parents[2] / "pair"
CHAIN = 5


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(PAIR / "target", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def texts(teacher) -> list[Text]:
    """Greedy ones and sampled ones."""
    made = []
    for i in range(8):
        torch.manual_seed(i)
        given = torch.randint(5, 2048, (1, 6 + i))
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if i % 2 else {"do_sample": False}
        options = {"attention_mask": torch.ones_like(given), "max_new_tokens": 40, "pad_token_id": 0}
        ids = teacher.model.generate(given, **options, **sampling)[0]
        made.append(Text(ids, given.shape[1], float(i % 2), "kind"))
    return made


def test_serving_a_text_is_an_expectation_over_where_passes_begin():
    chances = np.random.default_rng(0).random((9, 2))
    accepted = walk(chances, 3)

    def serve(place: int) -> tuple[float, float, float]:
        """Expected passes, and of them those that accept one draft or more, and two."""
        if place >= 9:
            return 0.0, 0.0, 0.0
        first, both = chances[place, 0], chances[place, 0] * chances[place, 1]
        total = np.array([1.0, first, both])
        for emitted, share in ((1, 1 - first), (2, first - both), (3, both)):
            total += share * np.array(serve(place + emitted))
        return tuple(total)

    passes, one, two = serve(3)
    assert accepted.passes == pytest.approx(passes)
    assert accepted.at == pytest.approx([one, two])
    assert accepted.mean == pytest.approx((one + two) / passes)
    assert accepted.rates == pytest.approx([one / passes, two / one])
    assert walk(chances, 9).passes == 0


def count_accepted(head: Head, teacher: Teacher, text: Text) -> tuple[int, int]:
    """Draft, verify and draft again, as a server does; accepted drafts, and passes."""
    accepted, passes, place = 0, 0, text.prompt_tokens
    while place + CHAIN < len(text.token_ids):
        known = text.token_ids[: place + 1]
        for kept in range(CHAIN):  # a block of more drafts has other first ones
            steps = CHAIN if head.kind in BLOCKS else kept + 1
            token = serve(head, teacher.model, known, place - 1, steps)[kept].argmax()
            token = token if head.draft_ids is None else head.draft_ids[token]
            if token != text.token_ids[place + 1 + kept]:
                break
            if head.kind not in BLOCKS:
                known = torch.cat((known, token[None]))
        else:
            kept = CHAIN
        accepted, passes, place = accepted + kept, passes + 1, place + kept + 1
    return accepted, passes


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in HEADS if (PAIR / kind).exists()])
def test_greedy_texts_are_judged_as_they_are_served(teacher, texts, kind):
    student = load_student(PAIR / kind, teacher).eval()
    counts = np.array([count_accepted(student.head, teacher, text) for text in texts if not text.temperature])
    found = judge(student, teacher, texts, CHAIN, batch_tokens=120)
    assert found["0"]["overall"].passes == counts[:, 1].sum() > 10
    assert sum(found["0"]["overall"].at) == pytest.approx(counts[:, 0].sum())
    assert found["0"]["kind"] == found["0"]["overall"]
    assert 0 < found["1"]["overall"].mean < CHAIN


@torch.no_grad()
def test_a_standalone_draft_is_judged_token_by_token(teacher, texts):
    student = load_student(PAIR / "draft", teacher).eval()
    accepted = passes = 0
    for text in texts:
        if text.temperature:
            continue
        place = text.prompt_tokens
        while place + CHAIN < len(text.token_ids):
            given, kept = text.token_ids[: place + 1], 0
            for _ in range(CHAIN):
                token = student.model(input_ids=given[None]).logits[0, -1].argmax()
                given = torch.cat((given, token[None]))
            while kept < CHAIN and given[place + 1 + kept] == text.token_ids[place + 1 + kept]:
                kept += 1
            accepted, passes, place = accepted + kept, passes + 1, place + kept + 1
    found = judge(student, teacher, texts, CHAIN, batch_tokens=120)["0"]["overall"]
    assert (found.passes, sum(found.at)) == (passes, accepted)


def test_the_target_as_its_own_draft_is_always_accepted(teacher, texts):
    found = judge(load_student(PAIR / "target", teacher).eval(), teacher, texts, CHAIN, batch_tokens=120)
    for temperature in ("0", "1"):
        assert found[temperature]["overall"].mean > 0.99 * CHAIN


def test_the_loss_is_that_of_the_answers_tokens_place_by_place(teacher, texts):
    student = load_student(PAIR / "eagle3", teacher)
    batch = pad(texts[:3])
    states = teacher.read(batch.token_ids)
    loss, right = Lesson(student, forward_kl, greedy_share=0.25)(batch.token_ids, batch.is_learnt, states, 2)
    ids, expected, hits = student.draft_ids, [[], []], []
    likely = [[], []]
    for text, padded in zip(texts[:3], batch.token_ids, strict=True):
        own = teacher.read(padded[None])
        p = own.logits[0].softmax(-1)
        features = student.head.features(own)[:, :-1]
        drafted = student.head.draft(padded[None, :-1], features, 2)
        for place, row in itertools.product(range(2), range(len(padded))):
            after = row + 1 + place  # of whose token the chain's draft is the successor
            if row >= drafted[place].shape[1] or not text.prompt_tokens - 1 <= after < len(text.token_ids) - 1:
                continue
            log_q = drafted[place][0, row].log_softmax(-1)
            expected[place].append(forward_kl(p[after, ids][None], log_q[None])[0])
            if p[after, ids].max() == p[after].max():
                likely[place].append(-log_q[p[after, ids].argmax()])
            if place == 0:
                hits.append(float(p[after, ids].max() == p[after].max() and log_q.argmax() == p[after, ids].argmax()))
    means = [
        0.75 * torch.stack(soft).mean() + 0.25 * torch.stack(hard).mean() for soft, hard in zip(expected, likely, strict=True)
    ]
    torch.testing.assert_close(loss, (means[0] + STEP_DECAY * means[1]) / (1 + STEP_DECAY), rtol=1e-3, atol=1e-4)
    assert float(right) == pytest.approx(sum(hits) / len(hits), abs=1e-6)
