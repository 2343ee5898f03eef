"""Records one step of the real model under its head for `tetris-sglang explain`: real answers to the project's own questions.

All that was drafted is verified, so that it is known what the target accepts under every capacity.

    .venv/bin/python scripts/record_step.py [--step 25]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from transformers import AutoTokenizer

from tests.e2e.plugins import write_plugin
from tetris_sglang.tools.explain import STEP_PATH
from tetris_sglang.tools.load import generate
from tetris_sglang.tools.prompts import read_questions, render_chats
from tetris_sglang.tools.real_model import HEAD, ensure_target
from tetris_sglang.tools.server_process import ServerProcess

QUESTIONS = ("code-01", "explain-00", "list-00", "write-00", "code-03", "explain-04")
NUM_STEPS, TAIL_TOKENS = 5, 5
DUMP = """
    import json
    from tetris_sglang.runtime import step

    original = step.make_result

    def make_result(record, result, next_draft_input):
        proposal, accepted = record.proposal, record.accepted
        if proposal is not None:
            requests = [
                {
                    "text_ids": (list(req.origin_input_ids) + list(req.output_ids)),
                    "ids": proposal.tokens[i].tolist(),
                    "survival": proposal.survival[i].tolist(),
                    "parents": proposal.shape.parents[i, 1:].tolist(),
                    "depths": proposal.shape.depths[i, 1:].tolist(),
                    "path": accepted.path[i, 1 : int(accepted.num_accepted[i]) + 1].tolist(),
                    "bonus": int(accepted.bonus_tokens[i]),
                    "is_whole": int(record.packed.verify_lens[i]) == len(proposal.tokens[i]) + 1,
                }
                for i, req in enumerate(record.batch.reqs)
            ]
            with open(STEPS, "a") as file:
                file.write(json.dumps(requests) + "\\n")
        return original(record, result, next_draft_input)

    step.make_result = make_result
"""


def record(folder: Path, prompts: list[str]) -> list[list[dict]]:
    """Every step of a server that answers the prompts together."""
    steps = folder / "steps.jsonl"
    environment = write_plugin(folder / "plugin", "dump_steps", DUMP.replace("STEPS", repr(str(steps))))
    arguments = [
        "--model-path", str(ensure_target()), "--dtype", "float32", "--random-seed", "0", "--max-total-tokens", "8192",
        "--speculative-algorithm", "TETRIS", "--speculative-draft-model-path", str(HEAD),
        "--speculative-num-steps", str(NUM_STEPS), "--speculative-num-draft-tokens", str(2 * NUM_STEPS + 1),
        "--speculative-tetris-capacity-per-request", str(2 * NUM_STEPS),
    ]  # fmt: skip
    with ServerProcess(arguments, folder / "log", environment=environment, start_timeout_s=600) as server:
        generate(server.url, prompts, concurrency=len(prompts), max_new_tokens=64, ignore_eos=True)
    return [json.loads(line) for line in steps.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=25, help="which of those with all requests in flight")
    wanted = parser.parse_args().step
    tokenizer = AutoTokenizer.from_pretrained(ensure_target())
    questions = {question.id: question for question in read_questions()}
    prompts = render_chats(ensure_target(), [questions[name].text for name in QUESTIONS])
    with tempfile.TemporaryDirectory() as folder:
        steps = record(Path(folder), prompts)
    whole = [step for step in steps if len(step) == len(QUESTIONS) and all(request["is_whole"] for request in step)]
    for number, step in enumerate(whole):
        print(number, [len(request["path"]) for request in step])
    requests = []
    for request in whole[wanted]:
        nodes = [
            {
                "text": tokenizer.decode([token]),
                "survival": round(survival, 4),
                # A column's number, 0 for the root.
                "parent": parent,
                "depth": depth,
                "is_right": column in request["path"],
            }
            for column, (token, survival, parent, depth) in enumerate(
                zip(request["ids"], request["survival"], request["parents"], request["depths"], strict=True), start=1
            )
        ]
        text = tokenizer.decode(request["text_ids"][-TAIL_TOKENS:])
        requests.append({"text": text, "nodes": nodes, "next": tokenizer.decode([request["bonus"]])})
    step = {"target": "SmolLM2-135M-Instruct", "draft": "its EAGLE-3 head", "requests": requests}
    STEP_PATH.write_text(json.dumps(step, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(STEP_PATH)


if __name__ == "__main__":
    main()
