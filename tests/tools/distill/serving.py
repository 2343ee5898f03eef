"""What a server drafts with a head, one chain or one block at a time, on transformers' layers: the reference of `heads.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from tetris_sglang.tools.distill.head_files import BLOCKS
from tetris_sglang.tools.distill.heads import Head, RmsNorm, read_target


def serve(head: Head, target: LlamaForCausalLM, tokens: Tensor, last: int, steps: int) -> list[Tensor]:
    """The logits of `steps` drafts behind token `last` + 1, of a text of [length] tokens."""
    draft = serve_one_block if head.kind in BLOCKS else serve_one_chain
    return draft(head, target, tokens, last, steps)


def serve_one_chain(head: Head, target: LlamaForCausalLM, tokens: Tensor, last: int, steps: int) -> list[Tensor]:
    """The logits of one chain as a server computes them, on transformers' layers.

    The head's sequence is its first-step inputs at positions 0 to `last`, then one entry per drafted token with
    its own hidden state; every step attends to all entries so far.
    """
    config = LlamaConfig(**{k: v for k, v in head.config.items() if k != "architectures"})
    config.intermediate_size = head.layer.mlp.gate_proj.out_features
    config._attn_implementation = "eager"
    attention, mlp = LlamaAttention(config, 0), LlamaMLP(config)
    ours = head.layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # eagle3's read two hidden states
        setattr(attention, name, getattr(ours, name))
    mlp.load_state_dict(head.layer.mlp.state_dict())
    rotary = LlamaRotaryEmbedding(config)
    states = read_target(target, tokens[None])

    def norm(x: Tensor, module: RmsNorm) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + head.config["rms_norm_eps"]).rsqrt() * module.weight

    if head.kind == "eagle3":
        captured = []
        hooks = [
            target.model.layers[i].register_forward_hook(lambda _m, _a, out: captured.append(out))
            for i in head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ]
        target.model(tokens[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        hidden = [head.fc(torch.cat(captured, -1))[0, : last + 1]]
    else:
        hidden = [states.last[0, : last + 1]]
    found = []
    for step in range(steps):
        count = last + 1 + step
        embeds, features = target.model.embed_tokens(tokens[1 : count + 1]), torch.cat(hidden)
        if head.kind == "eagle":
            residual = x = F.linear(torch.cat((embeds, features), -1), head.fc.weight, head.fc.bias)
        elif head.kind == "eagle3":
            residual = features
            x = torch.cat((norm(embeds, head.midlayer.input_layernorm), norm(features, head.midlayer.hidden_norm)), -1)
        else:
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
            parts = norm(features, head.hidden_layernorm), norm(embeds, head.token_layernorm)
            residual = F.linear(torch.cat(parts, -1), head.input_proj.weight)
            x = norm(residual, head.block.input_layernorm)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        attended = attention(x[None], position_embeddings=rotary(x, positions), attention_mask=mask)[0][0]
        residual = residual + attended
        out = (residual + mlp(norm(residual, head.layer.post_attention_layernorm)))[-1:]
        if head.kind == "eagle":
            found.append(target.lm_head(out)[0])
        elif head.kind == "eagle3":
            found.append(head.lm_head(norm(out, head.norm))[0])
        else:
            out = norm(out, head.final_layernorm)
            found.append(target.lm_head(out)[0])
        hidden.append(out)
    return found


def serve_one_block(head: Head, target: LlamaForCausalLM, tokens: Tensor, last: int, steps: int) -> list[Tensor]:
    """The logits of a block of `steps` drafts behind token `last` + 1, row by row, on transformers' rotary embedding."""
    config = LlamaConfig(**{k: v for k, v in head.config.items() if k != "architectures"})
    rotary = LlamaRotaryEmbedding(config)

    def norm(x: Tensor, module: RmsNorm) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + head.config["rms_norm_eps"]).rsqrt() * module.weight

    def heads_of(x: Tensor, linear: torch.nn.Linear, module: RmsNorm | None) -> Tensor:
        split = linear(x).view(len(x), -1, config.head_dim)
        return split if module is None else norm(split, module)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(x, positions[None])
        half = config.head_dim // 2
        return x * cos[0][:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[0][:, None]

    inputs = read_target(target, tokens[None]).layer_inputs
    read = [inputs[i + 1][0, : last + 1] for i in head.layer_ids]
    mask = target.model.embed_tokens.weight[head.mask_token]
    x = torch.stack([target.model.embed_tokens.weight[tokens[last + 1]], *[mask] * steps])
    known, places = torch.arange(last + 1), torch.arange(last + 1, last + 2 + steps)
    for index, layer in enumerate(head.layers):
        ours, h = layer.self_attn, norm(x, layer.input_layernorm)
        if head.kind == "dflash":
            context, of_keys, of_values = head.fc(torch.cat(read, -1)), ours.k_proj, ours.v_proj
        else:
            shares = head.layer_fusion_weights[index].exp()
            context = sum(share * state for share, state in zip(shares, read, strict=True)) / shares.sum()
            of_keys, of_values = ours.k_proj_target, ours.v_proj_target
        context = norm(context, head.hidden_norm)
        q = turn(heads_of(h, ours.q_proj, ours.q_norm), places)
        own = turn(heads_of(h, ours.k_proj, ours.k_norm), places)
        k = torch.cat((turn(heads_of(context, of_keys, ours.k_norm), known), own))
        v = torch.cat((heads_of(context, of_values, None), heads_of(h, ours.v_proj, None)))
        group = ours.heads // ours.kv_heads
        rows = []
        for row in q:
            mixed = [
                (k[:, n // group] @ row[n] / config.head_dim**0.5).softmax(0) @ v[:, n // group] for n in range(ours.heads)
            ]
            rows.append(torch.cat(mixed))
        x = x + ours.o_proj(torch.stack(rows))
        x = x + layer.mlp(norm(x, layer.post_attention_layernorm))
    return [target.lm_head(row) for row in norm(x, head.norm)[1:]]
