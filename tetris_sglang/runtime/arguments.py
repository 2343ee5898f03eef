"""TETRIS in SGLang's server arguments: flags, `Engine` arguments, validation, defaults."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from typing import Any, NamedTuple

import torch
from sglang.srt import environ

from tetris_sglang.config import (
    DEFAULT_NUM_STEPS,
    SETTINGS,
    Setting,
    TetrisConfig,
    export_arguments,
)
from tetris_sglang.portable_cpu.defaults import ATTENTION_BACKEND
from tetris_sglang.runtime.drafts import kind as draft_kind
from tetris_sglang.runtime.drafts.tokenizers import find_vocabulary

logger = logging.getLogger(__name__)

# SGLang's own default for speculation (arg_groups/speculative_hook.py, _handle_eagle_family).
_DEFAULT_MAX_RUNNING_REQUESTS = 48
_DRAFT_PATH = "--speculative-draft-model-path"
DEFAULT_CHILDREN, MAX_CHILDREN = 2, 4
"""Tokens of a level: a chain's, and runners-up."""


# -- flags and Engine arguments -----------------------------------------------------------------------------------


class _ExportSetting(argparse.Action):
    """Validates a TETRIS flag and writes it into the environment, where every process reads it."""

    def __init__(self, *args, setting: Setting, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._setting = setting

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        try:
            self._setting.parse_text(value, self._setting.flag)
        except ValueError as error:
            parser.error(str(error))
        os.environ[self._setting.variable] = value


def add_cli_args(_result, parser: argparse.ArgumentParser, *_) -> None:
    """AFTER hook of ServerArgs.add_cli_args."""
    group = parser.add_argument_group("TETRIS speculative decoding (tetris-sglang)")
    for setting in SETTINGS:
        group.add_argument(
            setting.flag,
            action=_ExportSetting,
            setting=setting,
            metavar=setting.metavar,
            default=argparse.SUPPRESS,
            help=f"{setting.help} Also {setting.variable}.",
        )


def accept_engine_arguments() -> None:
    """Let `Engine(speculative_tetris_*=...)` through, by way of the class attribute that makes its ServerArgs.

    Engine loads plugins first and builds its ServerArgs after that. A hook on ServerArgs itself comes too late: its
    fields are checked before `__init__` runs. Does nothing in processes without an Engine.
    """
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is None or getattr(engine.Engine.server_args_class, "accepts_tetris", False):
        return
    server_args_class = engine.Engine.server_args_class

    def build_server_args(**kwargs):
        export_arguments(kwargs)
        return server_args_class(**kwargs)

    build_server_args.accepts_tetris = True
    engine.Engine.server_args_class = staticmethod(build_server_args)


# -- validation ---------------------------------------------------------------------------------------------------


class Unsupported(NamedTuple):
    """A server argument that TETRIS does not work with yet."""

    argument: str
    flag: str
    reason: str

    def is_given(self, args) -> bool:
        value = getattr(args, self.argument)
        neutral = _NEUTRAL.get(self.argument, (None, False))
        return value not in neutral


# Values that mean "not in use", where None and False do not say it all.
_NEUTRAL: dict[str, tuple] = {
    "pp_size": (None, 1),
    "attn_dp_size": (None, 1),
    "attn_cp_size": (None, 1),
    "dcp_size": (None, 1),
    "moe_dp_size": (None, 1),
    "dwdp_size": (None, 1),
    "moe_a2a_backend": (None, "none"),
    "speculative_moe_a2a_backend": (None, "none"),
    "elastic_ep_backend": (None, "none"),
    "speculative_accept_threshold_single": (None, 1.0),
    "speculative_accept_threshold_acc": (None, 1.0),
    "disaggregation_mode": (None, "null"),
    "tokenizer_worker_num": (None, 1),
}

# Those that verify ragged batches, the default first.
ATTENTION_BACKENDS = {"cuda": ("flashinfer", "fa3"), "cpu": (ATTENTION_BACKEND,)}
_BACKEND_ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_SPLIT_CONTEXT = "ranks would hold parts of a request's keys and values, and verify parts of a ragged pass"
_SPLIT_EXPERTS = "ranks would have to agree on unlike parts of a ragged pass"
_UNGUARDED = "SGLang loads no plugins where it takes requests, so TETRIS could not refuse what it cannot serve"

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("enable_lora", "--enable-lora", "LoRA adapters would apply to the target and not to the draft"),
    Unsupported("lora_paths", "--lora-paths", "LoRA adapters would apply to the target and not to the draft"),
    Unsupported(
        "attn_dp_size",
        "--attn-dp-size / --enable-dp-attention",
        "DP attention needs a capacity agreed on between ranks",
    ),
    Unsupported("attn_cp_size", "--attn-cp-size", _SPLIT_CONTEXT),
    Unsupported("dcp_size", "--dcp-size", _SPLIT_CONTEXT),
    Unsupported("moe_dp_size", "--moe-dp-size", _SPLIT_EXPERTS),
    Unsupported("dwdp_size", "--dwdp-size", _SPLIT_EXPERTS),
    Unsupported("moe_a2a_backend", "--moe-a2a-backend", _SPLIT_EXPERTS),
    Unsupported("speculative_moe_a2a_backend", "--speculative-moe-a2a-backend", _SPLIT_EXPERTS),
    Unsupported("elastic_ep_backend", "--elastic-ep-backend", "every rank has to take part in every step"),
    Unsupported(
        "moe_dense_tp_size",
        "--moe-dense-tp-size",
        "SGLang pads passes to as many tokens for each request, and a ragged pass has unlike numbers",
    ),
    Unsupported("pp_size", "--pp-size", "pipeline parallelism splits the verify pass over stages"),
    Unsupported(
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        "a ragged pass cannot be split in two batches",
    ),
    Unsupported("enable_pdmux", "--enable-pdmux", "PD multiplexing runs decode under another attention backend"),
    Unsupported("disaggregation_mode", "--disaggregation-mode", "the draft's KV is not transferred between servers"),
    Unsupported("enable_mixed_chunk", "--enable-mixed-chunk", "a mixed batch decodes without drafting"),
    Unsupported("speculative_adaptive", "--speculative-adaptive", "it changes the draft length behind TETRIS's back"),
    Unsupported(
        "speculative_use_rejection_sampling",
        "--speculative-use-rejection-sampling",
        "TETRIS's drafts share the target's random numbers and are verified exactly without it",
    ),
    Unsupported(
        "speculative_accept_threshold_single",
        "--speculative-accept-threshold-single",
        "accepting below the target's probability is not exact",
    ),
    Unsupported(
        "speculative_accept_threshold_acc",
        "--speculative-accept-threshold-acc",
        "accepting below the target's probability is not exact",
    ),
    Unsupported(
        "enable_multi_layer_eagle",
        "--enable-multi-layer-eagle",
        "heads are drafted with one after the other, by the same layers",
    ),
    Unsupported(
        "enable_hierarchical_cache",
        "--enable-hierarchical-cache",
        "the draft's KV is not offloaded with the target's",
    ),
    Unsupported("enable_unified_memory", "--enable-unified-memory", "draft and target share slots of a plain pool"),
    Unsupported("enable_watermark", "--enable-watermark", "its state is not advanced over a ragged pass"),
    Unsupported(
        "enable_custom_logit_processor",
        "--enable-custom-logit-processor",
        "processors are not told about drafted tokens",
    ),
    Unsupported("tokenizer_worker_num", "--tokenizer-worker-num", _UNGUARDED),
    Unsupported("smg_grpc_mode", "--smg-grpc-mode", _UNGUARDED),
    Unsupported(
        "enable_deterministic_inference",
        "--enable-deterministic-inference",
        "what a step verifies, and so how its passes are split, depends on the load",
    ),
    Unsupported("is_embedding", "--is-embedding", "embeddings are not decoded"),
    Unsupported("dllm_algorithm", "--dllm-algorithm", "diffusion models do not draft"),
)


_SAMPLING_BACKENDS = ("flashinfer", "pytorch")


def validate_server_args(args) -> None:
    """Stop start-up on whatever TETRIS cannot serve, before any weights are loaded.

    Raises:
        ValueError: naming the flag, the value and the way out.
    """
    device = validate_device(args.device)
    _validate_attention_backends(args, device)
    for item in UNSUPPORTED:
        if item.is_given(args):
            raise ValueError(
                f"{item.flag} {getattr(args, item.argument)!r} does not work with --speculative-algorithm TETRIS: "
                f"{item.reason}. Remove that flag, or choose another --speculative-algorithm."
            )
    if environ.envs.SGLANG_RUST_SERVER.get():
        raise ValueError(
            f"SGLANG_RUST_SERVER=1 does not work with --speculative-algorithm TETRIS: {_UNGUARDED}. Unset that variable."
        )
    if environ.envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise ValueError(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH=1 does not work with --speculative-algorithm TETRIS: it would replay the verify "
            "pass's plan of one step in all that follow. Unset that variable."
        )
    if args.sampling_backend not in (None, *_SAMPLING_BACKENDS):
        raise ValueError(
            f"--sampling-backend {args.sampling_backend}: TETRIS draws with SGLang's own sampler on "
            f"{' or '.join(_SAMPLING_BACKENDS)}. Choose one of them, or leave it out."
        )
    num_steps = _resolve_num_steps(args)
    config = TetrisConfig.from_environment(num_steps)
    plan = os.environ.get("SGLANG_TETRIS_VERIFY_PLAN")
    if plan and (device == "cpu" or (args.attention_backend or "flashinfer") != "flashinfer"):
        raise ValueError(
            f"--speculative-tetris-verify-plan {plan}: it chooses how FlashInfer plans on a GPU, and this server runs on "
            f"{device} with another attention backend. Leave it out."
        )
    if config.record is not None and (args.dp_size or 1) > 1:
        raise ValueError(
            f"--speculative-tetris-record {config.record}: the {args.dp_size} schedulers of --dp-size would write to one file. "
            f"Record with --dp-size 1."
        )
    kind = _validate_models(args, config)
    _validate_shape(args, num_steps, kind, device, config)
    os.environ[draft_kind.VARIABLE] = kind


def _validate_shape(args, num_steps: int, kind: str, device: str, config: TetrisConfig) -> None:
    topk, num_draft_tokens = args.speculative_eagle_topk, args.speculative_num_draft_tokens
    if topk not in (None, 1):
        raise ValueError(
            f"--speculative-eagle-topk {topk}: TETRIS drafts chains, and runners-up beside their tokens, which are as good as "
            f"trees and take no further passes. Leave it out."
        )
    if config.draws_drafts:
        _validate_drawn(args, kind, config)
    if num_draft_tokens is None:
        return
    given = f"--speculative-num-draft-tokens {num_draft_tokens} with --speculative-num-steps {num_steps}"
    most = 1 + MAX_CHILDREN * num_steps
    if not num_steps + 1 <= num_draft_tokens <= most:
        raise ValueError(
            f"{given}: a chain has {num_steps + 1} tokens, its root included; with runners-up, up to {most}. Choose a value in "
            f"that range, or leave it out."
        )
    if num_draft_tokens == num_steps + 1:
        return
    obstacle = _find_obstacle_to_runners_up(args, kind, device, config)
    if obstacle is not None:
        raise ValueError(f"{given} asks for runners-up beside a chain's tokens, and {obstacle}. Leave it out.")


def _find_obstacle_to_runners_up(args, kind: str, device: str, config: TetrisConfig) -> str | None:
    if kind == draft_kind.NGRAM:
        return "n-grams draft one chain"
    if config.acceptance == "block":
        return "--speculative-tetris-acceptance block judges chains alone"
    for name in _BACKEND_ARGUMENTS[:-1] if device == "cuda" else ():  # the draft's own passes are chains
        if getattr(args, name) not in (None, "flashinfer"):
            return f"--{name.replace('_', '-')} {getattr(args, name)} has no mask for them (flashinfer does)"
    if device == "cuda" and args.kv_cache_dtype not in (None, "auto"):
        return f"--kv-cache-dtype {args.kv_cache_dtype} keeps keys and values that cannot be moved where they belong"
    if args.enable_return_routed_experts:
        return (
            "--enable-return-routed-experts reports experts by the place where a draft was verified, and an accepted one moves"
        )
    return None


def _validate_drawn(args, kind: str, config: TetrisConfig) -> None:
    given = f"--speculative-tetris-acceptance {config.acceptance}"
    if kind == draft_kind.NGRAM:
        raise ValueError(f"{given}: n-grams have no probabilities to draw from. Leave it out.")
    if kind == draft_kind.DFLASH:
        raise ValueError(f"{given}: a DFlash draft's trees are judged by the target's own draws. Leave it out.")
    if (args.tp_size or 1) > 1:
        raise ValueError(
            f"{given} with --tp-size {args.tp_size}: ranks would judge by their own rounding. Use --tp-size 1, or leave it out."
        )


def validate_device(device: str | None) -> str:
    """The device that TETRIS will serve on, "cuda" or "cpu"; None is what SGLang would choose by itself.

    Raises:
        ValueError: another device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu") or torch.version.hip:
        raise ValueError(
            f"--device {device}: --speculative-algorithm TETRIS serves on NVIDIA GPUs (cuda) and on CPUs. Use "
            f"--speculative-algorithm STANDALONE on this device, or --device cpu."
        )
    return kind


def _validate_attention_backends(args, device: str) -> None:
    supported = ATTENTION_BACKENDS[device]
    for name in _BACKEND_ARGUMENTS:
        backend = getattr(args, name)
        if backend is not None and backend not in supported:
            raise ValueError(
                f"--{name.replace('_', '-')} {backend!r} does not work with --speculative-algorithm TETRIS on {device}: "
                f"ragged batches are served by {' and '.join(supported)}. Remove that flag, or choose another "
                f"--speculative-algorithm."
            )


def _resolve_num_steps(args) -> int:
    if args.speculative_num_steps is not None:
        return int(args.speculative_num_steps)
    path = args.speculative_draft_model_path
    if path:
        draft = load_config(path, _DRAFT_PATH, args.trust_remote_code, args.speculative_draft_model_revision)
        if draft_kind.is_block(draft):
            return _read_block(draft).block_size - 1
    return DEFAULT_NUM_STEPS


def _read_block(draft: Any):
    """SGLang's reading of a DFlash draft's config, its block size resolved as the model does."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    config = parse_dflash_draft_config(draft_hf_config=draft)
    return dataclasses.replace(config, block_size=config.resolve_block_size(default=16))


def _validate_block(args, draft: Any) -> None:
    given, block = f"{_DRAFT_PATH} {args.speculative_draft_model_path}", _read_block(draft)
    if block.projector_type is not None or block.selector_rank or block.conv_kernel_size:
        raise ValueError(
            f"{given}: of DFlash drafts TETRIS serves those without a projector, a candidate selector and convolutions. Choose "
            f"another draft, or --speculative-algorithm DFLASH."
        )
    if block.mask_token_id is None:
        raise ValueError(f"{given}: its config.json names no dflash_config.mask_token_id. Add the id of its mask token there.")
    if _resolve_num_steps(args) >= block.block_size:
        raise ValueError(
            f"--speculative-num-steps {args.speculative_num_steps}: a block of this draft has {block.block_size} tokens, "
            f"the bonus token included. Give at most {block.block_size - 1}, or leave it out."
        )


def _validate_models(args, config: TetrisConfig) -> str:
    """The kind of the draft, see `draft_kind.find_kind`."""
    draft_path = args.speculative_draft_model_path
    if draft_path == "":
        raise ValueError(
            "--speculative-draft-model-path is empty: give the path or hub name of a draft, or leave the flag out to draft "
            "from n-grams of recent texts."
        )
    target = load_config(args.model_path, "--model-path", args.trust_remote_code, args.revision)
    validate_architecture("--model-path", args.model_path, target)
    _validate_positions(args, target)
    draft = None
    if draft_path is not None:
        draft = load_config(
            draft_path,
            "--speculative-draft-model-path",
            args.trust_remote_code,
            args.speculative_draft_model_revision,
        )
        validate_architecture("--speculative-draft-model-path", draft_path, draft)
    kind = draft_kind.find_kind(config.draft, target, draft_path, draft)
    if args.speculative_token_map is not None and kind != draft_kind.EAGLE:
        raise ValueError(
            f"--speculative-token-map {args.speculative_token_map}: it belongs to EAGLE heads, and this draft is {kind}. "
            f"Leave it out."
        )
    if draft is not None and target.vocab_size != draft.vocab_size:
        if kind in draft_kind.HEADS:
            raise ValueError(
                f"--speculative-draft-model-path {draft_path}: its vocabulary has {draft.vocab_size} tokens, that of "
                f"--model-path {args.model_path} has {target.vocab_size}. Choose a head trained for this target."
            )
        find_vocabulary(args, target.vocab_size, draft.vocab_size)  # a standalone draft's: raises before weights are loaded
    if kind == draft_kind.DFLASH:
        _validate_block(args, draft)
    if kind in draft_kind.HEADS and target.hidden_size != getattr(
        draft, "target_hidden_size", draft.hidden_size if draft else target.hidden_size
    ):
        raise ValueError(
            f"--speculative-draft-model-path {draft_path}: this head reads hidden states of {draft.hidden_size} values, "
            f"--model-path {args.model_path} has {target.hidden_size}. Choose a head trained for this target."
        )
    return kind


def load_config(path: str, flag: str, trust_remote_code: bool, revision: str | None):
    """The text part of a model's config, without its weights."""
    from transformers import AutoConfig

    looks_local = path.startswith(("/", ".", "~")) or os.path.exists(path)
    if looks_local and not os.path.isdir(path):
        raise ValueError(f"{flag} {path}: no such folder. Give a folder with config.json and weights, or a hub name.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:
        raise ValueError(f"{flag} {path}: no model configuration could be loaded ({error}).") from error
    return config.get_text_config()


def validate_architecture(flag: str, path: str, config: Any) -> None:
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"{flag} {path}: sliding-window attention (sliding_window={config.sliding_window}) is not supported by "
            f"TETRIS yet. Use a model with full attention, or another --speculative-algorithm."
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    recurrent = {name for name in layer_types if name not in ("full_attention", "attention")}
    if recurrent or any("mamba" in name.lower() for name in getattr(config, "architectures", None) or ()):
        raise ValueError(
            f"{flag} {path}: layers of type {sorted(recurrent) or 'mamba'} are not supported by TETRIS yet. Use a "
            f"model with full attention in every layer, or another --speculative-algorithm."
        )
    if getattr(config, "kv_lora_rank", None):
        # Upstream's FlashInfer backend for it plans as many rows for every request, whatever the ragged layout says.
        raise ValueError(
            f"{flag} {path}: multi-head latent attention (kv_lora_rank={config.kv_lora_rank}) is not supported by TETRIS yet. "
            f"Use a model with full keys and values, or another --speculative-algorithm."
        )


def _validate_positions(args, target: Any) -> None:
    rotary = getattr(target, "rope_parameters", None) or getattr(target, "rope_scaling", None) or {}
    if "mrope_section" in rotary and not args.language_model_only:
        raise ValueError(
            f"--model-path {args.model_path}: positions of several dimensions (mrope_section) are not laid out over a ragged "
            f"pass. Serve its text part with --language-model-only, or choose another --speculative-algorithm."
        )


# -- defaults -----------------------------------------------------------------------------------------------------


def resolve_server_args(args) -> None:
    """Fill in what TETRIS implies. `args` is SGLang's recording stand-in: plain assignments are declared for us."""
    num_steps = _resolve_num_steps(args)
    kind = draft_kind.current_kind()
    args.speculative_eagle_topk = 1
    if args.speculative_num_draft_tokens is None:
        config = TetrisConfig.from_environment(num_steps)
        if kind == draft_kind.NGRAM and args.speculative_num_steps is None and config.capacity_is_automatic:
            num_steps *= 2  # no passes are needed
        # A fixed capacity keeps to the paper's chains.
        obstacle = _find_obstacle_to_runners_up(args, kind, validate_device(args.device), config)
        num_children = DEFAULT_CHILDREN if config.capacity_is_automatic and obstacle is None else 1
        args.speculative_num_draft_tokens = 1 + num_children * num_steps
    args.speculative_num_steps = num_steps
    if kind == draft_kind.MTP and args.speculative_draft_model_path is None:
        args.speculative_draft_model_path = args.model_path
    if args.max_running_requests is None:
        args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS
        logger.warning(
            "TETRIS: at most %d requests run at once, as with SGLang's own speculation; without it SGLang takes as many as "
            "memory holds. Give --max-running-requests what your load needs.",
            _DEFAULT_MAX_RUNNING_REQUESTS,
        )
    if validate_device(args.device) == "cuda":
        # Every process of the server reads these. SGLang captures target passes by tokens instead of requests:
        os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
        # and plans the draft's passes from host lengths, without waiting for the device.
        os.environ.setdefault("SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR", "1")
