"""SGLang's model class for a standalone draft that the target steers (SD², arXiv:2511.09844).

A vector is made of the target's state after the last token that it has read, each layer scaled to a mean square of 1. A matrix
turns it into one for each layer, which is added to what that layer's feed-forward part reads. Behind the window's pass the
vector itself is handed on from pass to pass, as heads hand on their hidden state. `tetris-sglang distill --steer` trains such
drafts (tools/distill/steering.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import ModelRegistry
from torch import Tensor

_STATES_EPS = 1e-6


class SteeredLlamaForCausalLM(LlamaForCausalLM):
    """See the module. Embedding and output layer are its own."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        num_read = len(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        self._vector_size, self._state_size, layers = config.hidden_size, config.target_hidden_size, self.model.layers
        self.read_target = ReplicatedLinear(num_read * self._state_size, self._vector_size, bias=False)
        self.steer = ReplicatedLinear(self._vector_size, len(layers) * self._vector_size, bias=False)
        self._pushes: tuple[Tensor, ...] = ()
        for index, layer in enumerate(layers):
            layer.mlp.register_forward_pre_hook(lambda _module, args, index=index: self._push(index, *args))

    def _push(self, index: int, hidden: Tensor, *others):
        return hidden + self._pushes[index], *others

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch, **_):
        """Reads forward_batch.spec_info.hidden_states: [rows, layers read * target_hidden_size], or the vectors themselves."""
        vectors = forward_batch.spec_info.hidden_states
        if vectors.shape[-1] != self._vector_size:
            states = vectors.unflatten(-1, (-1, self._state_size))
            vectors, _ = self.read_target(F.rms_norm(states, (self._state_size,), eps=_STATES_EPS).flatten(-2))
        pushes, _ = self.steer(vectors)
        self._pushes = pushes.chunk(len(self.model.layers), dim=-1)
        hidden = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, [vectors])


def register_model() -> None:
    """Make the architecture known to SGLang in this process."""
    ModelRegistry.models[SteeredLlamaForCausalLM.__name__] = SteeredLlamaForCausalLM
