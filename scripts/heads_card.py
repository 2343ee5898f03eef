"""The draft heads' section of the pair's model card."""

from __future__ import annotations

from collections.abc import Sequence


def render_heads(heads: dict, prompt_kinds: Sequence[str]) -> str:
    """The section on the draft heads that `scripts/train_heads.py` trained, from its measured numbers alone."""
    sizes, histories, accepted = [], [], []
    for kind, head in heads["heads"].items():
        history, mean = head["training"], head["acceptance"]["mean_accepted"]
        sizes.append(
            f"| `{kind}/` | {head['parameters'] / 1e6:.2f} M | {head['heads']} / {head['kv_heads']} | "
            f"{head['intermediate']} | {head['vocabulary']} |"
        )
        histories.append(
            f"| `{kind}/` | {history['steps']} | {history['tokens'] / 1e6:.2f} M | {history['unrolled']} | "
            f"{history['first_loss']:.2f} -> {history['last_loss']:.2f} |"
        )
        accepted.append(
            f"| `{kind}/` | " + " | ".join(f"{mean[k]:.2f}" for k in (*prompt_kinds, "overall")) + " |"
        )
    eagle3 = heads["heads"].get("eagle3")
    aux = (
        f"\n- `eagle3/` reads the outputs of target layers {', '.join(map(str, eagle3['layer_ids']))} and drafts "
        f"the {eagle3['vocabulary']} most frequent\n  tokens, which are {eagle3['coverage']:.1%} of those that the "
        "target writes (`d2t` in its weights is the map)."
        if eagle3
        else ""
    )
    return f"""
## Draft heads

Made by `scripts/train_heads.py` for this target: each is one layer that reads the target's hidden states, in the
form that SGLang loads. Embedding and `lm_head` (`eagle3/`: the embedding) are the target's.

| | parameters | query / kv heads | intermediate | vocabulary |
|---|---|---|---|---|
{chr(10).join(sizes)}

- `eagle/` reads the state after the last norm (EAGLE, EAGLE-2).{aux}
- `mtp/` holds the MTP layer alone: `scripts/mtp_checkpoint.py` joins target and layer to a complete
  MiMoForCausalLM, whose function is the target's. Its attention has the target's sizes.

Trained on the same text as the draft: half cross-entropy to the target's distribution, half to its likeliest
token, averaged over chains of the head's own hidden states (unrolled); for `eagle/` also smooth L1 between its
hidden state and the target's.

| | steps | tokens | unrolled | training loss |
|---|---|---|---|---|
{chr(10).join(histories)}

Mean accepted tokens, measured as above:

| | {" | ".join((*prompt_kinds, "overall"))} |
|---|---|---|---|---|---|
{chr(10).join(accepted)}
"""
