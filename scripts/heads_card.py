"""The draft heads' section of the pair's model card."""

from __future__ import annotations

from collections.abc import Sequence


def render_heads(heads: dict, prompt_kinds: Sequence[str]) -> str:
    """The section on the draft heads that `scripts/train_heads.py` trained, from its measured numbers alone."""
    kinds = (*prompt_kinds, "overall")
    sizes, histories, accepted = [], [], []
    for kind, head in heads["heads"].items():
        history, mean = head["training"], head["acceptance"]["mean_accepted"]
        rounds = ", ".join(f"{steps} x {unrolled}" for steps, unrolled, _ in history["rounds"])
        sizes.append(
            f"| `{kind}/` | {head['parameters'] / 1e6:.2f} M | {head['heads']} / {head['kv_heads']} | "
            f"{head['intermediate']} | {head['vocabulary']} |"
        )
        histories.append(
            f"| `{kind}/` | {rounds} | {history['tokens'] / 1e6:.2f} M | "
            f"{history['first_loss']:.2f} -> {history['last_loss']:.2f} |"
        )
        accepted.append(f"| `{kind}/` | {' | '.join(f'{mean[k]:.2f}' for k in kinds)} |")
    size_rows, history_rows, accepted_rows = ("\n".join(rows) for rows in (sizes, histories, accepted))
    notes = "- `eagle/` reads the state after the last norm (EAGLE, EAGLE-2)."
    if "eagle3" in heads["heads"]:
        eagle3 = heads["heads"]["eagle3"]
        layers = ", ".join(map(str, eagle3["layer_ids"]))
        notes += f"""
- `eagle3/` reads the outputs of target layers {layers}, and drafts the {eagle3["vocabulary"]} most frequent tokens. `d2t` in
  its weights maps them; they are {eagle3["coverage"]:.1%} of the tokens that the target writes after the prompts."""
    return f"""
## Draft heads

Made by `scripts/train_heads.py` for this target: each is one layer (`dflash/`, `dflare/`: two) that reads the target's hidden
states, in the form that SGLang loads. Embedding and `lm_head` (`eagle3/`: the embedding) are the target's.

| | parameters | query / kv heads | intermediate | vocabulary |
|---|---|---|---|---|
{size_rows}

{notes}
- `mtp/` holds the MTP layer alone: `scripts/mtp_checkpoint.py` joins target and layer to a complete
  MiMoForCausalLM, whose function is the target's. The layer takes the target's sizes there, without another effect.
- `dflash/` and `dflare/` draft five tokens in one pass, from the outputs of the same layers as `eagle3/`. They were trained for
  a quarter of an hour, and for six minutes.

Trained on the same text as the draft: half cross-entropy to the target's distribution, half to its likeliest
token, averaged over chains of the head's own hidden states; for `eagle/` also smooth L1 between its
hidden state and the target's, a tenth of it in the last round.

| | steps x length of the chains | tokens | training loss |
|---|---|---|---|
{history_rows}

Mean accepted tokens, measured as above:

| | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{accepted_rows}
"""
