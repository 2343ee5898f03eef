"""The model of a DFlare draft (arXiv:2606.02091), which SGLang has not: a DFlash draft with two changes.

Each of its layers reads a mixture of the target's layers of its own, and what the target has read goes through matrices of
its own to keys and values. Names of weights are those of AngelSlim's checkpoints (Tencent/AngelSlim,
angelslim/compressor/speculative/train/models/draft/qwen_dflare.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.models.dflash import DFlashAttention, DFlashDecoderLayer, DFlashDraftModel
from sglang.srt.models.registry import ModelRegistry
from torch import Tensor, nn

_CONTEXT_WEIGHT = re.compile(r"(?:model\.)?(layers\.\d+\.self_attn\.)([kv])_proj_target\.(weight|bias)")
_MIXTURES = "layer_fusion_weights"


class _Attention(DFlashAttention):
    def __init__(self, config, layer_id: int, quant_config=None, prefix: str = "") -> None:
        super().__init__(config=config, layer_id=layer_id, quant_config=quant_config, prefix=prefix)
        self.kv_proj_target = QKVParallelLinear(
            hidden_size=self.hidden_size,
            head_size=self.head_dim,
            total_num_heads=0,
            total_num_kv_heads=self.total_num_kv_heads,
            bias=bool(getattr(config, "attention_bias", False)),
            quant_config=quant_config,
            prefix=f"{prefix}.kv_proj_target" if prefix else "kv_proj_target",
        )

    def kv_proj_only(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Args: hidden_states: [rows, hidden_size], this layer's mixture. Returns: two of [rows, kv_size]."""
        both, _ = self.kv_proj_target(hidden_states)
        keys, values = both.split(self.kv_size, dim=-1)
        return keys, values


class _DecoderLayer(DFlashDecoderLayer):
    attention_cls = _Attention


class QwenDFlareDraftModel(DFlashDraftModel):
    """See the module. Its name is the architecture in AngelSlim's configs."""

    decoder_layer_cls = _DecoderLayer
    supports_fused_context_kv = False

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.fc = None  # mixtures take its place
        mixtures = torch.zeros(len(self.layers), self.num_context_features)
        self.layer_fusion_weights = nn.Parameter(mixtures, requires_grad=False)

    def project_target_hidden(self, target_hidden: Tensor) -> Tensor:
        """Args: target_hidden: [rows, target layers * hidden_size]. Returns: [draft layers, rows, hidden_size]."""
        states = target_hidden.unflatten(-1, (self.num_context_features, -1))
        shares = self.layer_fusion_weights.float().softmax(-1).to(states.dtype)
        mixed = torch.einsum("rth,lt->lrh", states, shares)
        return self.hidden_norm(mixed.flatten(0, 1)).view_as(mixed)

    def prepare_context_hidden_for_kv(self, layer: DFlashDecoderLayer, ctx_hidden: Tensor) -> Tensor:
        """Args: ctx_hidden: as `project_target_hidden` returns. Returns: [rows, hidden_size], this layer's."""
        return ctx_hidden[layer.self_attn.attn.layer_id]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises: ValueError: the checkpoint lacks what a DFlash draft has not."""
        parameters = dict(self.named_parameters())
        loaded = set()

        def load_context() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                found = _CONTEXT_WEIGHT.fullmatch(name)
                loaded.add(name.removeprefix("model."))
                if found is None:
                    yield name, weight
                    continue
                layer, key_or_value, what = found.groups()
                parameter = parameters[f"{layer}kv_proj_target.{what}"]
                parameter.weight_loader(parameter, weight, key_or_value)

        super().load_weights(load_context())
        of_layers = (f"layers.{i}.self_attn.{part}_proj_target.weight" for i in range(len(self.layers)) for part in "kv")
        missing = {_MIXTURES, *of_layers} - loaded
        if missing:
            raise ValueError(
                f"--speculative-draft-model-path: a DFlare draft without {', '.join(sorted(missing))}. Choose another one."
            )


def register_model() -> None:
    """Make the architecture known to SGLang in this process."""
    # Its own `register` reads whole packages.
    ModelRegistry.models[QwenDFlareDraftModel.__name__] = QwenDFlareDraftModel
