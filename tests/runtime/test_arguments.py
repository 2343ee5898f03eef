"""TETRIS in SGLang's server arguments: its flags, and what stops a server before any weights are loaded."""

import argparse
import json

import pytest
import torch
from sglang.srt.server_args import ServerArgs, prepare_server_args

from tetris_sglang.config import SETTINGS, TetrisConfig
from tetris_sglang.runtime.arguments import (
    UNSUPPORTED,
    resolve_server_args,
    validate_device,
    validate_server_args,
)
from tetris_sglang.runtime.drafts import kind as draft_kind

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def write_config(tmp_path):
    """Writes a folder with a config.json and no weights; returns its path."""

    def write(name: str = "model", **fields) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | fields))
        return str(folder)

    return write


@pytest.fixture
def make_args(write_config, environment):
    """Server arguments with a good pair of models, but for what is given."""
    target, draft = write_config("target"), write_config("draft", hidden_size=32)

    def make(**arguments) -> ServerArgs:
        defaults = {
            "model_path": target,
            "speculative_draft_model_path": draft,
            "speculative_algorithm": "TETRIS",
            "device": "cpu",
        }
        return ServerArgs(**(defaults | arguments))

    return make


def assert_refused(args: ServerArgs, *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        validate_server_args(args)
    for part in parts:
        assert part in str(error.value)


# -- flags --------------------------------------------------------------------------------------------------------


@pytest.fixture
def parser(plugins) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def test_flags_are_in_the_help_of_a_server(parser):
    text = " ".join(parser.format_help().split())
    for setting in SETTINGS:
        assert f"{setting.flag} {setting.metavar}" in text
        assert f"Also {setting.variable}." in text


def test_flags_reach_the_configuration(parser, environment):
    namespace = parser.parse_args(
        [
            "--model-path",
            "m",
            "--speculative-tetris-capacity-tokens",
            "7",
            "--speculative-tetris-selection=uniform",
        ]
    )
    assert TetrisConfig.from_environment(4, environment) == TetrisConfig(4, None, 7, "uniform")
    assert ServerArgs.from_cli_args(namespace).model_path == "m"


def test_absent_flags_leave_the_variables_alone(parser, environment):
    environment["SGLANG_TETRIS_CAPACITY_TOKENS"] = "3"
    parser.parse_args(["--model-path", "m"])
    assert environment["SGLANG_TETRIS_CAPACITY_TOKENS"] == "3"


def test_a_flag_wins_over_its_variable(parser, environment):
    environment["SGLANG_TETRIS_CAPACITY_TOKENS"] = "3"
    parser.parse_args(["--model-path", "m", "--speculative-tetris-capacity-tokens", "7"])
    assert TetrisConfig.from_environment(4, environment).capacity_tokens == 7


@pytest.mark.parametrize(
    "flag, value, rule",
    [
        ("--speculative-tetris-capacity-per-request", "0", "must be auto or a finite number above 0"),
        ("--speculative-tetris-capacity-per-request", "nan", "must be auto or a finite number above 0"),
        ("--speculative-tetris-capacity-per-request", "inf", "must be auto or a finite number above 0"),
        ("--speculative-tetris-capacity-per-request", "many", "must be auto or a finite number above 0"),
        ("--speculative-tetris-capacity-tokens", "0", "must be a whole number above 0"),
        ("--speculative-tetris-capacity-tokens", "-4", "must be a whole number above 0"),
        ("--speculative-tetris-capacity-tokens", "2.5", "must be a whole number"),
        ("--speculative-tetris-selection", "best", "must be one of tetris, uniform, random"),
        ("--speculative-tetris-phase-times", "maybe", "must be one of on, true, yes, 1, off, false, no, 0"),
    ],
)
def test_a_bad_flag_ends_parsing(parser, environment, capsys, flag, value, rule):
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--model-path", "m", f"{flag}={value}"])
    assert exit_.value.code == 2
    assert f"error: {flag}={value!r}: {rule}" in capsys.readouterr().err
    assert not [name for name in environment if name.startswith("SGLANG_TETRIS_")]


def test_an_unknown_flag_ends_parsing(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--speculative-tetris-budget", "3"])
    assert "--speculative-tetris-budget 3" in capsys.readouterr().err


# -- what TETRIS does not work with -------------------------------------------------------------------------------

# One value of each argument that asks for the unsupported feature.
GIVEN = {
    "lora_paths": ["adapter"],
    "attn_dp_size": 2,
    "pp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "moe_dp_size": 2,
    "dwdp_size": 2,
    "moe_a2a_backend": "deepep",
    "speculative_moe_a2a_backend": "deepep",
    "elastic_ep_backend": "mooncake",
    "moe_dense_tp_size": 1,
    "disaggregation_mode": "decode",
    "speculative_accept_threshold_single": 0.5,
    "speculative_accept_threshold_acc": 0.5,
    "dllm_algorithm": "LowConfidence",
    "tokenizer_worker_num": 2,
}


@pytest.mark.parametrize("item", UNSUPPORTED, ids=lambda item: item.argument)
def test_unsupported_arguments_are_refused_by_name(make_args, item):
    value = GIVEN.get(item.argument, True)
    assert_refused(make_args(**{item.argument: value}), item.flag, repr(value), item.reason, "Remove that flag")


def test_what_the_readme_lists_is_refused():
    """The refusals that must not get lost: LoRA, DP attention, PP, two-batch overlap, PD, thresholds."""
    assert {item.argument for item in UNSUPPORTED} >= {
        "enable_lora",
        "lora_paths",
        "attn_dp_size",
        "pp_size",
        "enable_two_batch_overlap",
        "enable_pdmux",
        "disaggregation_mode",
        "enable_mixed_chunk",
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
        "enable_custom_logit_processor",
        "dcp_size",
        "moe_a2a_backend",
        "tokenizer_worker_num",
    }


def test_variables_that_do_not_work_with_it_are_refused(make_args, monkeypatch):
    for name in ("SGLANG_RUST_SERVER", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert_refused(make_args(), f"{name}=1", "Unset")


def test_positions_of_several_dimensions_are_refused(make_args, write_config):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    target = write_config("images", rope_parameters=rope)
    assert_refused(make_args(model_path=target), f"--model-path {target}", "--language-model-only")
    validate_server_args(make_args(model_path=target, language_model_only=True))


def test_a_good_pair_is_accepted(make_args):
    validate_server_args(make_args())
    validate_server_args(make_args(speculative_num_steps=5, speculative_num_draft_tokens=6, speculative_eagle_topk=1))
    validate_server_args(make_args(tp_size=2))


def test_other_algorithms_are_left_alone(plugins, make_args):
    args = make_args(speculative_algorithm="STANDALONE", speculative_num_steps=2, speculative_eagle_topk=1,
                     speculative_num_draft_tokens=3, enable_custom_logit_processor=True)  # fmt: skip
    args.resolve_once()


def test_a_sampler_of_other_hardware_is_refused(make_args):
    assert_refused(
        make_args(sampling_backend="ascend"),
        "--sampling-backend ascend",
        "flashinfer or pytorch",
        "leave it out",
    )
    validate_server_args(make_args(sampling_backend="pytorch"))


@pytest.mark.parametrize("device", ["xpu", "npu", "hpu"])
def test_devices_that_cannot_verify_ragged_batches_are_refused(make_args, device):
    assert_refused(make_args(device=device), f"--device {device}", "STANDALONE", "--device cpu")


def test_rocm_calls_itself_cuda_and_is_refused(make_args, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert_refused(make_args(device="cuda"), "--device cuda", "NVIDIA")


def test_an_unresolved_device_is_the_one_sglang_would_choose(monkeypatch):
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert validate_device(None) == device
    assert validate_device("cuda:1") == "cuda"


@pytest.mark.parametrize(
    "device, backend, other",
    [
        ("cuda", "flashinfer", "torch_ragged"),
        ("cuda", "fa3", "triton"),
        ("cpu", "torch_ragged", "flashinfer"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ],
)
def test_attention_backends_of_each_device(make_args, name, device, backend, other):
    validate_server_args(make_args(**{"device": device, name: backend}))
    flag = "--" + name.replace("_", "-")
    assert_refused(make_args(**{"device": device, name: other}), flag, repr(other), device, backend)


@pytest.mark.parametrize("device, backend", [("cpu", None), ("cuda", "fa3")])
def test_a_plan_that_nothing_would_follow_is_refused(make_args, monkeypatch, device, backend):
    monkeypatch.setenv("SGLANG_TETRIS_VERIFY_PLAN", "host")
    validate_server_args(make_args(device="cuda"))
    args = make_args(device=device, attention_backend=backend)
    assert_refused(args, "--speculative-tetris-verify-plan host", device)


# -- drafting and capacity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, -1, 1000])
def test_number_of_steps(make_args, num_steps):
    assert_refused(make_args(speculative_num_steps=num_steps), f"--speculative-num-steps={num_steps}", "between 1 and")


@pytest.mark.parametrize("num_steps, num_draft_tokens", [(4, 4), (4, 1), (4, 18), (None, 5)])
def test_number_of_draft_tokens_that_contradicts_the_steps(make_args, num_steps, num_draft_tokens):
    args = make_args(speculative_num_steps=num_steps, speculative_num_draft_tokens=num_draft_tokens)
    assert_refused(args, f"--speculative-num-draft-tokens {num_draft_tokens}", "Choose a value in that range")


@pytest.mark.parametrize("num_draft_tokens", [5, 6, 9, 17])
def test_number_of_draft_tokens_with_and_without_runners_up(make_args, num_draft_tokens):
    validate_server_args(make_args(speculative_num_steps=4, speculative_num_draft_tokens=num_draft_tokens))


def test_n_grams_have_no_runners_up(make_args):
    args = make_args(speculative_draft_model_path=None, speculative_num_steps=4, speculative_num_draft_tokens=9)
    assert_refused(args, "--speculative-num-draft-tokens 9", "n-grams draft one chain", "Leave it out")


def test_rules_of_acceptance_and_what_they_judge(make_args, environment):
    environment["SGLANG_TETRIS_ACCEPTANCE"] = "block"
    validate_server_args(make_args(speculative_num_steps=4))
    args = make_args(speculative_num_steps=4, speculative_num_draft_tokens=9)
    assert_refused(args, "--speculative-num-draft-tokens 9", "--speculative-tetris-acceptance block judges chains alone")
    environment["SGLANG_TETRIS_ACCEPTANCE"] = "rejection"
    validate_server_args(make_args(speculative_num_steps=4, speculative_num_draft_tokens=9))
    args = make_args(speculative_draft_model_path=None)
    assert_refused(args, "--speculative-tetris-acceptance rejection", "no probabilities to draw from")
    assert_refused(make_args(tp_size=2), "--speculative-tetris-acceptance rejection with --tp-size 2", "--tp-size 1")


@pytest.mark.parametrize("topk", [0, 2])
def test_there_are_no_trees(make_args, topk):
    assert_refused(make_args(speculative_eagle_topk=topk), f"--speculative-eagle-topk {topk}", "Leave it out")


@pytest.mark.parametrize(
    "name",
    [
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
    ],
)
def test_runners_up_on_gpus_need_flashinfer(make_args, name):
    validate_server_args(make_args(device="cuda", **{name: "fa3"}))
    assert_refused(
        make_args(speculative_num_steps=4, speculative_num_draft_tokens=9, device="cuda", **{name: "fa3"}),
        f"--{name.replace('_', '-')} fa3",
        "--speculative-num-draft-tokens 9",
        "flashinfer",
    )


@pytest.mark.parametrize(
    "variables, part",
    [
        ({"SGLANG_TETRIS_CAPACITY_TOKENS": "0"}, "SGLANG_TETRIS_CAPACITY_TOKENS)='0'"),
        ({"SGLANG_TETRIS_CAPACITY_PER_REQUEST": "word"}, "SGLANG_TETRIS_CAPACITY_PER_REQUEST)='word'"),
        ({"SGLANG_TETRIS_CAPACITY": "3"}, "SGLANG_TETRIS_CAPACITY='3': no such TETRIS variable"),
        ({"SGLANG_TETRIS_CAPACITY_TOKENS": "4", "SGLANG_TETRIS_CAPACITY_PER_REQUEST": "2"}, "are both given"),
    ],
)
def test_variables_are_checked_at_start(make_args, environment, variables, part):
    environment.update(variables)
    assert_refused(make_args(), part)


# -- models -------------------------------------------------------------------------------------------------------


def test_an_empty_draft_path(make_args):
    assert_refused(
        make_args(speculative_draft_model_path=""),
        "--speculative-draft-model-path is empty",
        "leave the flag",
    )


BLOCK = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0]},
}
HEAD = {"hidden_size": 64, "num_hidden_layers": 1}
STEERED = {"architectures": ["SteeredLlamaForCausalLM"], "hidden_size": 32, "target_hidden_size": 64}
KINDS = {
    "standalone": ({}, {"hidden_size": 32}),
    "eagle": ({}, {"architectures": ["LlamaForCausalLMEagle"], **HEAD}),
    "eagle3": ({}, {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, **HEAD}),
    "dflash": ({}, BLOCK),
    "steered": ({}, STEERED),
    "mtp": ({"num_nextn_predict_layers": 1}, None),
    "ngram": ({}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_draft_is_found_out(make_args, write_config, environment, kind):
    target, draft = KINDS[kind]
    draft = None if draft is None else write_config("its_draft", **draft)
    args = make_args(model_path=write_config("its_target", **target), speculative_draft_model_path=draft)
    validate_server_args(args)
    assert draft_kind.current_kind() == kind
    environment["SGLANG_TETRIS_DRAFT"] = kind
    validate_server_args(args)
    environment["SGLANG_TETRIS_DRAFT"] = "ngram" if kind == "standalone" else "standalone"
    other = environment["SGLANG_TETRIS_DRAFT"]
    assert_refused(args, f"--speculative-tetris-draft {other} contradicts", kind, "Leave the flag out")


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "QwenDFlareDraftModel"])
def test_a_block_is_drafted_whole_unless_fewer_steps_are_asked_for(plugins, make_args, write_config, architecture):
    draft = write_config("block", **BLOCK | {"architectures": [architecture]})
    args = make_args(speculative_draft_model_path=draft)
    validate_server_args(args)
    assert draft_kind.current_kind() == "dflash"
    resolve_server_args(args)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (7, 15)
    validate_server_args(make_args(speculative_draft_model_path=draft, speculative_num_steps=3))
    with pytest.raises(ValueError, match=r"--speculative-num-steps 8: a block of this draft has 8 tokens.*at most 7"):
        validate_server_args(make_args(speculative_draft_model_path=draft, speculative_num_steps=8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"projector_type": "domino", "gru_hidden_dim": 8, "emb_dim": 8, "shift_label": True, "pure_draft_prefix_len": 1},
            "without a projector",
        ),
        ({"conv_kernel_size": 3, "conv_group_size": 8}, "without a projector, a candidate selector and convolutions"),
        ({"mask_token_id": None}, "names no dflash_config.mask_token_id"),
    ],
)
def test_blocks_that_need_more_are_refused(make_args, write_config, environment, changed, message):
    draft = write_config("block", **BLOCK | {"dflash_config": BLOCK["dflash_config"] | changed})
    with pytest.raises(ValueError, match=message):
        validate_server_args(make_args(speculative_draft_model_path=draft))


def test_layers_of_the_target_need_not_be_used(make_args, write_config, environment):
    environment["SGLANG_TETRIS_DRAFT"] = "ngram"
    target = write_config("its_target", num_nextn_predict_layers=1)
    validate_server_args(make_args(model_path=target, speculative_draft_model_path=None))
    assert draft_kind.current_kind() == "ngram"


def test_a_head_of_another_target(make_args, write_config):
    draft = write_config("head", architectures=["LlamaForCausalLMEagle"], hidden_size=96)
    assert_refused(make_args(speculative_draft_model_path=draft), f"--speculative-draft-model-path {draft}", "96", "64")


def test_a_token_map_without_an_eagle_head(make_args):
    assert_refused(make_args(speculative_token_map="map.pt"), "--speculative-token-map map.pt", "standalone")


@pytest.mark.parametrize("argument", ["model_path", "speculative_draft_model_path"])
@pytest.mark.parametrize("path", ["/no/such/folder", "./no/such/folder", "../nothing"])
def test_path_that_does_not_exist(make_args, argument, path):
    flag = "--" + argument.replace("_", "-")
    assert_refused(make_args(**{argument: path}), f"{flag} {path}: no such folder", "Give a folder")


def test_folder_without_a_config(make_args, tmp_path):
    assert_refused(
        make_args(speculative_draft_model_path=str(tmp_path)),
        f"--speculative-draft-model-path {tmp_path}: no model configuration could be loaded",
    )


def test_a_heads_vocabulary_is_the_targets(make_args, write_config):
    draft = write_config("other", **HEAD, architectures=["LlamaForCausalLMEagle"], vocab_size=500)
    assert_refused(
        make_args(speculative_draft_model_path=draft), f"--speculative-draft-model-path {draft}", "500", "512", "Choose"
    )


def test_a_standalone_draft_of_another_vocabulary_needs_tokenizers(make_args, write_config):
    path = write_config("other", vocab_size=500)
    with pytest.raises(ValueError, match=rf"{path}: its vocabulary has 500 tokens, the target's 512.*Give both"):
        validate_server_args(make_args(speculative_draft_model_path=path))


ARCHITECTURES = {
    "mistral": ({"model_type": "mistral", "sliding_window": 128}, "sliding_window=128"),
    "qwen2": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
        "sliding_window=128",
    ),
    "gemma2": ({"model_type": "gemma2", "sliding_window": 128, "head_dim": 32}, "sliding"),
    "qwen3_next": ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "linear_attention"),
    "mamba": ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
    "deepseek_v3": ({"model_type": "deepseek_v3", "kv_lora_rank": 64}, "kv_lora_rank=64"),
}


@pytest.mark.parametrize("argument", ["model_path", "speculative_draft_model_path"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_without_full_attention(make_args, write_config, argument, name):
    fields, reason = ARCHITECTURES[name]
    path = write_config(name, **fields)
    flag = "--" + argument.replace("_", "-")
    assert_refused(make_args(**{argument: path}), f"{flag} {path}", reason, "not supported by TETRIS yet", "another")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128},
        {"model_type": "qwen3"},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_architectures_with_full_attention(make_args, write_config, fields):
    validate_server_args(make_args(speculative_draft_model_path=write_config("other", **fields)))


# -- through SGLang's own resolution, as in a server --------------------------------------------------------------


def resolve(args: ServerArgs) -> ServerArgs:
    args.resolve_once()
    return args


def test_resolution_fills_in_what_tetris_implies(plugins, make_args):
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(resolve(make_args(speculative_num_steps=4)))
    assert resolved.speculative_algorithm == "TETRIS"
    assert resolved.speculative_num_steps == 4
    assert resolved.speculative_eagle_topk == 1


@pytest.mark.parametrize(
    "settings, expected",
    [({}, 9), ({"CAPACITY_PER_REQUEST": "3"}, 5), ({"CAPACITY_TOKENS": "8"}, 5), ({"ACCEPTANCE": "block"}, 5)],
)
def test_there_is_room_for_runners_up_where_the_capacity_sets_itself(plugins, make_args, monkeypatch, settings, expected):
    from sglang.srt.arg_groups.overrides import resolving_view

    for name, value in settings.items():
        monkeypatch.setenv(f"SGLANG_TETRIS_{name}", value)
    resolved = resolving_view(resolve(make_args(speculative_num_steps=4)))
    assert resolved.speculative_num_draft_tokens == expected


@pytest.mark.parametrize(
    "given, settings, expected",
    [
        ({}, {}, (12, 13)),
        ({"speculative_num_steps": 6}, {}, (6, 7)),
        ({"speculative_num_draft_tokens": 7}, {}, (6, 7)),
        ({}, {"CAPACITY_PER_REQUEST": "3"}, (6, 7)),
    ],
)
def test_n_grams_draft_deep_by_themselves(plugins, make_args, monkeypatch, given, settings, expected):
    from sglang.srt.arg_groups.overrides import resolving_view

    for name, value in settings.items():
        monkeypatch.setenv(f"SGLANG_TETRIS_{name}", value)
    resolved = resolving_view(
        resolve(make_args(**{"speculative_draft_model_path": None, "speculative_num_steps": None, **given}))
    )
    assert (resolved.speculative_num_steps, resolved.speculative_num_draft_tokens) == expected


@pytest.mark.parametrize("given, expected", [(None, 48), (200, 200)])
def test_fewer_requests_than_without_speculation_are_announced(plugins, make_args, caplog, given, expected):
    caplog.set_level("WARNING", logger="tetris_sglang")
    args = make_args(speculative_num_steps=4)
    args.max_running_requests = given  # the portable CPU platform has a limit of its own
    resolve_server_args(args)
    assert args.max_running_requests == expected
    assert ("at most 48 requests run at once" in caplog.text) == (given is None)


def test_resolution_finds_the_targets_own_layers(plugins, make_args, write_config):
    from sglang.srt.arg_groups.overrides import resolving_view

    target = write_config("its_target", num_nextn_predict_layers=1)
    args = make_args(model_path=target, speculative_draft_model_path=None)
    assert resolving_view(resolve(args)).speculative_draft_model_path == target


@pytest.mark.parametrize("spelling", ["TETRIS", "tetris"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        # SGLang loads the draft's configuration before it asks a registered algorithm to validate.
        (
            {"speculative_draft_model_path": "/no/such"},
            "--speculative-draft-model-path /no/such: no such folder",
        ),
        ({"speculative_num_steps": 0}, "--speculative-num-steps=0"),
        ({"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
    ],
    ids=["no folder", "no steps", "trees"],
)
def test_resolution_ends_with_our_message(plugins, make_args, spelling, arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve(make_args(speculative_algorithm=spelling, **arguments))


def test_several_schedulers_do_not_record_to_one_file(make_args, environment, tmp_path):
    environment["SGLANG_TETRIS_RECORD"] = str(tmp_path / "run.trace")
    validate_server_args(make_args())
    assert_refused(make_args(dp_size=2), "--speculative-tetris-record", "--dp-size 1")


def test_the_deprecated_dp_attention_flag_is_refused(plugins, make_args):
    with pytest.raises(ValueError, match="--attn-dp-size / --enable-dp-attention 2"):
        resolve(make_args(dp_size=2, tp_size=2, enable_dp_attention=True))


def test_prepare_server_args_takes_our_flags(plugins, environment, make_args):
    args = make_args()
    prepared = prepare_server_args(
        ["--model-path", args.model_path, "--speculative-algorithm", "TETRIS", "--speculative-draft-model-path",
         args.speculative_draft_model_path, "--speculative-tetris-capacity-per-request", "1.5"]
    )  # fmt: skip
    resolve(prepared)
    assert environment["SGLANG_TETRIS_CAPACITY_PER_REQUEST"] == "1.5"
