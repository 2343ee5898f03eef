"""Requests that want no drafts, or more or fewer than others, in the same batch as requests without wishes."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.client import GREEDY, make_request, texts

SILENT = {"tetris": {"speculate": False}}


def generate_batch(server, prompts: list[str], custom_params: list[dict | None], **params) -> list[dict]:
    """One HTTP request of many prompts, so that all of them run together."""
    sampling_params = [{**GREEDY, **params, "custom_params": each} for each in custom_params]
    response = server.post("/generate", {"text": prompts, "sampling_params": sampling_params})
    assert response.status_code == 200, response.text
    return response.json()


def assert_drafted_nothing(output: dict) -> None:
    meta_info = output["meta_info"]
    assert meta_info["spec_num_selected_drafts"] == meta_info["spec_num_correct_drafts"] == 0
    assert meta_info["spec_verify_success_rate"] is None
    assert meta_info["spec_accept_rate"] == 0
    # The prompt's pass gives the first token.
    assert meta_info["spec_verify_ct"] == meta_info["completion_tokens"] - 1


def selected_per_step(output: dict) -> float:
    return output["meta_info"]["spec_num_selected_drafts"] / output["meta_info"]["spec_verify_ct"]


def test_requests_opt_out_while_others_speculate(overlap, plain, mixed_prompts):
    prompts = mixed_prompts[:12]
    wishes = [SILENT if i % 3 == 0 else None for i in range(12)]
    outputs = generate_batch(overlap, prompts, wishes, max_new_tokens=40)
    assert texts(outputs) == texts(plain.generate_all(prompts, max_new_tokens=40))
    for output, wish in zip(outputs, wishes, strict=True):
        if wish is None:
            assert output["meta_info"]["spec_num_selected_drafts"] > 0
        else:
            assert_drafted_nothing(output)


def test_a_batch_that_wants_no_drafts_at_all(overlap, plain, mixed_prompts):
    prompts = mixed_prompts[12:16]
    selected = overlap.tetris_state()["selected_tokens"]
    outputs = generate_batch(overlap, prompts, [SILENT] * 4, max_new_tokens=24)
    assert texts(outputs) == texts(plain.generate_all(prompts, max_new_tokens=24))
    for output in outputs:
        assert_drafted_nothing(output)
    assert overlap.tetris_state()["selected_tokens"] == selected
    # The request slots serve others afterwards.
    for output in generate_batch(overlap, prompts, [None] * 4, max_new_tokens=24):
        assert output["meta_info"]["spec_num_selected_drafts"] > 0


def test_all_samples_of_a_request_have_its_wishes(overlap, mixed_prompts):
    body = make_request(mixed_prompts[3], n=3, temperature=0.8, max_new_tokens=12, custom_params=SILENT)
    outputs = overlap.post("/generate", body).json()
    assert len(outputs) == 3
    for output in outputs:
        assert output["meta_info"]["spec_num_selected_drafts"] == 0


def test_weight_moves_drafts_to_a_request(overlap, plain, mixed_prompts):
    prompts = mixed_prompts[20:28]
    expected = texts(plain.generate_all(prompts, max_new_tokens=48, ignore_eos=True))
    shares = []
    for weight in (1 / 64, 1, 64):
        wishes = [{"tetris": {"weight": weight}}, *[None] * 7]
        outputs = generate_batch(overlap, prompts, wishes, max_new_tokens=48, ignore_eos=True)
        assert texts(outputs) == expected
        shares.append(selected_per_step(outputs[0]))
    light, usual, heavy = shares
    assert light < usual < heavy


BAD = [
    ({"tetris": {"weight": 100}}, ["custom_params.tetris.weight=100", "from 1/64 to 64"]),
    ({"tetris": {"speculate": "no"}}, ["custom_params.tetris.speculate=", "true or false"]),
    ({"tetris": {"wieght": 2}}, ["custom_params.tetris.wieght=2", "Did you mean weight?"]),
    ({"tetris_weight": 2}, ["custom_params.tetris_weight=2", "speculate, weight"]),
]


@pytest.mark.parametrize(("custom_params", "parts"), BAD)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", None),
        ("/generate", "batch"),
        ("/v1/completions", {"prompt": "def"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def"}]}),
    ],
    ids=["native", "native batch", "completions", "chat"],
)
def test_bad_values_get_400(overlap, path, body, custom_params, parts):
    if body is None:
        body = make_request("def", max_new_tokens=4, custom_params=custom_params)
    elif body == "batch":
        body = {"text": ["def", "class"], "sampling_params": [GREEDY, {"custom_params": custom_params}]}
    else:
        body = {"model": "default", "max_tokens": 4, "custom_params": custom_params, **body}
    response = overlap.post(path, body)
    assert response.status_code == 400, response.text
    message = str(response.json())
    for part in parts:
        assert part in message
    assert overlap.generate("def", max_new_tokens=3)["meta_info"]["completion_tokens"] >= 1


@pytest.mark.parametrize("custom_params", [[1], "tetris", {"tetris": [1]}, {"tetris": {"weight": {"a": 1}}}])
def test_ill_typed_custom_params_get_400(overlap, custom_params):
    response = overlap.post("/generate", make_request("def", max_new_tokens=4, custom_params=custom_params))
    assert response.status_code == 400 and "custom_params" in response.text
    assert overlap.generate("def", max_new_tokens=3)["meta_info"]["completion_tokens"] >= 1


def test_openai_extra_body(overlap, plain, mixed_prompts):
    def ask(server, custom_params: dict | None) -> tuple[str, str]:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        common = {"model": "default", "max_tokens": 24, "temperature": 0}
        extra_body = {} if custom_params is None else {"custom_params": custom_params}
        completion = client.completions.create(prompt=mixed_prompts[1], extra_body=extra_body, **common)
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": "Explain zip_longest"}], extra_body=extra_body, **common
        )
        return completion.choices[0].text, chat.choices[0].message.content

    def count_selected() -> int:
        return overlap.tetris_state()["selected_tokens"]

    before = count_selected()
    silent = ask(overlap, SILENT)
    assert count_selected() == before
    weighted = ask(overlap, {"tetris": {"weight": 4.0}})
    assert count_selected() > before
    assert silent == weighted == ask(plain, None)
