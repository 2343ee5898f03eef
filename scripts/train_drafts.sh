#!/usr/bin/env bash
# The drafts of SmolLM2-135M-Instruct that docs/distill.md compares, into build/drafts: about two hours on two cores. What an
# earlier call has finished stays, and what it began goes on.
#
#     scripts/train_drafts.sh [NAME...]        # e.g. pruned; default: all, in the order in which they need each other
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=("$@")
made=build/drafts
code=$made/head-code-work/target-texts.jsonl chat=$made/pruned-work/target-texts.jsonl

train() { # NAME, then options of `tetris-sglang distill`
    local name=$1
    shift
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -e "$made/$name/metrics.json" ]; then return; fi
    echo "== $name"
    .venv/bin/python -m tetris_sglang distill --out "$made/$name" --max-tokens 256 --batch-tokens 1024 --resume "$@"
    cp "$made/$name/metrics.json" "benchmarks/results/drafts/$name-training.json"
}

mkdir -p benchmarks/results/drafts
# The shipped head, which has seen ShareGPT's questions, on code.
train head-code --draft tetris_sglang/data/smollm2-135m-eagle3 --prompts functions --max-texts 700 --steps 200
# Four of the target's 30 layers as a model of its own; then 80 steps more, steered and not.
if [ ! -e "$made/layers" ]; then .venv/bin/python scripts/prune_model.py --layers 0,1,2,29 --out "$made/layers"; fi
train pruned --draft "$made/layers" --prompts sharegpt --max-texts 500 --traffic "$code" --rate 0.001 --steps 200
train pruned-longer --draft "$made/pruned" --traffic "$code" --traffic "$chat" --rate 0.0003 --steps 80
train pruned-steered --draft "$made/pruned" --traffic "$code" --traffic "$chat" --rate 0.0003 --steps 80 --steer
train dflash --draft dflash --mask-token "<empty_output>" --traffic "$code" --traffic "$chat" --steps 300
