"""Requests that are refused with a 400, by name, and those that are not."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from tetris_sglang.runtime.requests.refuse import guard_request, validate_request

VOCAB_SIZE = 100
PROMPT = [1, 2, 3]


def make_request(sampling_params: dict | None = None, **fields) -> GenerateReqInput:
    return GenerateReqInput(input_ids=PROMPT, sampling_params=sampling_params or {}, **fields)


def assert_refused(request: GenerateReqInput, *parts: str, input_ids=PROMPT) -> None:
    with pytest.raises(ValueError) as error:
        validate_request(request, input_ids, VOCAB_SIZE)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("beam_width", 2),
    ],
)
def test_sampling_parameters_that_are_not_supported(name, value):
    assert_refused(make_request({name: value, "temperature": 0}), f"{name}={value}", "TETRIS", "Leave it out")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.1, "beam_width": 1},
        {"frequency_penalty": None, "repetition_penalty": None, "beam_width": None},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "sampling_seed": 3},
        {"temperature": 0, "n": 4, "max_new_tokens": 1, "min_new_tokens": 1, "ignore_eos": True},
        {"stop": ["a"], "stop_token_ids": [3], "stop_regex": "a+", "logit_bias": {"3": 1.0}},
        {"regex": "[0-9]+"},
        {"json_schema": "{}"},
    ],
)
def test_sampling_parameters_that_are_served(params):
    validate_request(make_request(params), PROMPT, VOCAB_SIZE)


@pytest.mark.parametrize(
    "field, value",
    [
        ("lora_path", "adapter"),
        ("custom_logit_processor", "{}"),
        ("return_hidden_states", True),
        ("input_embeds", [[0.0]]),
        ("image_data", ["image.png"]),
        ("video_data", ["video.mp4"]),
        ("audio_data", ["audio.wav"]),
        ("return_sampling_mask", True),
    ],
)
def test_fields_that_are_not_supported(field, value):
    assert_refused(make_request(**{field: value}), field, "not supported with --speculative-algorithm TETRIS")


@pytest.mark.parametrize(
    "fields",
    [{}, {"return_logprob": True, "top_logprobs_num": 2}, {"stream": True}, {"return_hidden_states": False}],
)
def test_fields_that_are_served(fields):
    validate_request(make_request(**fields), PROMPT, VOCAB_SIZE)


@pytest.mark.parametrize("input_ids", [[], (), array("q")])
def test_empty_prompt(input_ids):
    assert_refused(make_request(), "The prompt is empty", "at least one token", input_ids=input_ids)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**40])
@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("q", ids)])
def test_token_outside_the_vocabulary(token, position, kind):
    input_ids = kind([*PROMPT[:position], token, *PROMPT[position:]])
    assert_refused(make_request(), f"token id {token} is outside the vocabulary (0..99)", input_ids=input_ids)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9])
@pytest.mark.parametrize("min_new_tokens", [0, 1])
def test_stop_token_outside_the_vocabulary(token, min_new_tokens):
    """Where one request of a batch has min_new_tokens, SGLang looks at the stop tokens of all."""
    params = {"stop_token_ids": [3, token], "min_new_tokens": min_new_tokens}
    assert_refused(make_request(params), f"stop_token_ids: token id {token} is outside the vocabulary (0..99)")


@pytest.mark.parametrize("input_ids", [[0], [VOCAB_SIZE - 1], list(range(VOCAB_SIZE)), array("q", [5]), None])
def test_token_inside_the_vocabulary(input_ids):
    validate_request(make_request(), input_ids, VOCAB_SIZE)


@pytest.mark.parametrize("custom_params", [None, {}, {"tetris": {"speculate": False, "weight": 4}}, {"x": [1]}])
def test_custom_params_that_are_served(custom_params):
    validate_request(make_request({"custom_params": custom_params}), PROMPT, VOCAB_SIZE)


def test_custom_params_that_do_not_parse():
    assert_refused(
        make_request({"custom_params": {"tetris": {"weight": 0}}}),
        "custom_params.tetris.weight=0",
        "from 1/64 to 64",
        "speculate: false",
    )


# -- the hook -----------------------------------------------------------------------------------------------------


def make_manager(algorithm: str | None, preferred_params: dict | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        server_args=SimpleNamespace(speculative_algorithm=algorithm),
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE),
        preferred_sampling_params=preferred_params,
    )


@pytest.mark.parametrize("algorithm", ["TETRIS", "tetris"])
def test_hook_guards_a_tetris_server(algorithm):
    """However it is spelled on the command line."""
    with pytest.raises(ValueError, match="empty"):
        guard_request(make_manager(algorithm), make_request(), [])
    assert guard_request(make_manager(algorithm), make_request(), PROMPT) is None


def test_a_turn_of_a_session_may_add_nothing():
    guard_request(make_manager("TETRIS"), make_request(session_params={"id": "one"}), [])


@pytest.mark.parametrize("preferred", [{"beam_width": 2}, {"custom_params": {"tetris": {"weight": 65}}}])
def test_what_the_server_prefers_is_validated_unless_the_request_says_otherwise(preferred):
    manager = make_manager("TETRIS", preferred)
    with pytest.raises(ValueError, match=r"beam_width=2|weight=65"):
        guard_request(manager, make_request(), PROMPT)
    guard_request(manager, make_request({"beam_width": 1, "custom_params": None}), PROMPT)


@pytest.mark.parametrize("algorithm", [None, "STANDALONE", "EAGLE"])
def test_hook_leaves_other_servers_alone(algorithm):
    guard_request(make_manager(algorithm), make_request({"beam_width": 2}, lora_path="adapter"), PROMPT)


def test_sglang_asks_the_hook_first(plugins):
    """Through SGLang's own method, patched by the plugin: refused before anything of the manager's is used."""
    with pytest.raises(ValueError, match="beam_width=2"):
        TokenizerManager._validate_one_request(make_manager("TETRIS"), make_request({"beam_width": 2}), PROMPT)
