#!/usr/bin/env bash
# Every comparison of servers under benchmarks/results, at this commit, on a machine that does nothing else. Some hours on two
# cores; what an earlier call has finished stays. Then: .venv/bin/python scripts/render_results.py
#
#     scripts/measure_results.sh [NAME...]        # e.g. real-text/sharegpt-0-head; default: all
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=("$@")

measure() { # NAME, then options of `tetris-sglang bench`
    local name=$1 out=benchmarks/results/$1.json resume=()
    shift
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -e "$out" ]; then resume=(--resume); fi
    echo "== $name"
    # The pool holds what 32 requests need: four servers at once fit into 20 GB.
    .venv/bin/tetris-sglang bench --out "$out" --turn-seconds 5 --output-len 64 --waves 3 --prompts 6 \
        --server-flags="--max-total-tokens 16384" "${resume[@]}" "$@"
}

# SGLang's own at its best k, which real-text/best-k has.
HEAD_K=1
NGRAM_K=1
measure real-text/best-k --arms none,sglang --drafts eagle3,ngram --k 1,2,3,4 --concurrency 4

compare() { # NAME, temperature, then the workload's options
    local name=$1 temperature=$2
    shift 2
    local common=(--arms none,auto,sglang,tetris --capacity-tokens none --extra 2 --temperature "$temperature" "$@")
    measure "real-text/$name-head" "${common[@]}" --drafts eagle3 --k $HEAD_K
    if [ "$temperature" != 1 ]; then measure "real-text/$name-ngram" "${common[@]}" --drafts ngram --k $NGRAM_K; fi
}

useless() { # workload, loads
    measure "real-text/$1-0-useless" --arms none,control,auto,sglang --drafts useless --k $HEAD_K --workload "$1" --concurrency "$2"
}

compare sharegpt-0 0 --workload sharegpt --concurrency 1,4,8,16,32
useless sharegpt 1,4,8,16,32
compare humaneval-0 0 --workload humaneval --concurrency 1,4,16
useless humaneval 1,4,16
for workload in sharegpt humaneval; do
    for temperature in 0.7 1; do
        compare $workload-$temperature $temperature --workload $workload --concurrency 1,4,16
    done
done
measure equal-lengths/sharegpt-0-head --arms none,auto,sglang --drafts eagle3 --k $HEAD_K --lengths equal --concurrency 1,4,16
measure paper/sharegpt-0-head --arms none,sglang,tetris --capacity-tokens none --drafts eagle3 --k 1,2,3 --extra 1,2,3 \
    --concurrency 16
measure ablations/sharegpt-0-shapes --arms none,auto --drafts eagle3 --num-draft-tokens 7,19 --concurrency 1,4,16
measure ablations/sharegpt-0-variants --arms none,auto --drafts eagle3 --variants calibration=off,shared-texts=on \
    --concurrency 1,4,16
