#!/usr/bin/env bash
# Every comparison of servers under benchmarks/results, at this commit, on a machine that does nothing else. Some hours on two
# cores; what an earlier call has finished stays. Then: .venv/bin/python scripts/render_results.py
#
#     scripts/measure_results.sh [NAME...]        # e.g. real-text/sharegpt-head; default: all
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=("$@")

measure() { # NAME, then options of `tetris-sglang bench`
    local name=$1 out=benchmarks/results/$1.json resume=()
    shift
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -e "$out" ]; then resume=(--resume); fi
    echo "== $name"
    # The pool holds what 32 requests need: four servers at once fit into 20 GB. Short turns: a machine's speed changes within
    # seconds. Longer than one: by that a server knows a step in which it stood still.
    .venv/bin/python -m tetris_sglang bench --out "$out" --turn-seconds 1.25 --output-len 64 --waves 2 --prompts 6 --repeats 3 \
        --server-flags="--max-total-tokens 16384" "${resume[@]}" "$@"
}

# The others compare with k = 1 of SGLang's own. Servers take as long to start as to be measured, so a file has what it can.
# Trees of 8 nodes, 5 deep, of 4 branches are what SGLang chooses where nothing is given.
measure real-text/best-k --arms none,sglang --drafts eagle3,ngram --k 1,2,3,8 --topk 1,4 --num-steps 5 --concurrency 4

# Of SGLang's own and of the fixed TETRIS in what follows; best-k says which is best.
K=1

compare() { # NAME, draft, prompts, temperatures
    measure "real-text/$1" --arms none,auto,sglang,tetris --k "$K" --extra 1 --capacity-tokens none --drafts "$2" \
        --concurrency 1,4,8,16,32 --workload "$3" --temperature "$4"
}
compare sharegpt-head eagle3 sharegpt 0
compare sharegpt-head-sampled eagle3 sharegpt 0.7,1
compare humaneval-head eagle3 humaneval 0
compare humaneval-head-sampled eagle3 humaneval 0.7,1
compare sharegpt-ngram ngram sharegpt 0,0.7
compare humaneval-ngram ngram humaneval 0,0.7

# What two servers that are alike differ by shows here: a second one without speculation.
useless() { # NAME, prompts
    measure "real-text/$1" --arms none,control,auto --drafts useless --concurrency 1,4,8,16,32 --workload "$2"
}
useless sharegpt-useless sharegpt
useless humaneval-useless humaneval
measure equal-lengths/sharegpt --arms none,auto,sglang --drafts eagle3 --k 1 --lengths equal --concurrency 1,4,16
measure paper/sharegpt --arms none,sglang,tetris --capacity-tokens none --drafts eagle3 --k 1,2,3 --extra 1,2,3 --concurrency 4,16,32
measure ablations/sharegpt --arms none,auto --drafts eagle3 --num-draft-tokens 7 --variants calibration=off,shared-texts=on \
    --concurrency 1,4,16
# Which rule of acceptance, and runners-up or not.
measure ablations/sharegpt-rules --arms none,auto --drafts eagle3 --temperature 0.7,1 --num-draft-tokens 7 \
    --variants acceptance=rejection,acceptance=block --concurrency 1,16

draft() { # NAME of scripts/train_drafts.sh, its kind, prompts, then options of `tetris-sglang bench`
    local name=$1 kind=$2 prompts=$3
    shift 3
    if [ ! -e "build/drafts/$name/metrics.json" ]; then
        echo "drafts/$name: scripts/train_drafts.sh makes it"
        return
    fi
    measure "drafts/$name" --drafts "$kind" --draft "$kind=build/drafts/$name" --workload "$prompts" --concurrency 1,4 \
        --temperature 0,0.7 "$@"
}

draft head-code eagle3 humaneval --arms none,auto
draft pruned-longer standalone sharegpt --arms none,auto,sglang --k 1
draft pruned-steered standalone sharegpt --arms none,auto
draft dflash dflash sharegpt --arms none,auto,full --k 4 --extra 1 --capacity-tokens none --num-steps 5 --temperature 0,0.7,1
