"""Every way in: OpenAI API, SGLang's frontend language, Engine, `sglang serve`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import openai
import sglang as sgl

from tests.e2e.client import Client
from tests.e2e.conftest import ARGUMENTS, DRAFT, NUM_STEPS, TARGET
from tetris_sglang.tools.server_process import ServerProcess


def test_openai_completions_and_chat(plain, featured, mixed_prompts):
    answers = []
    for server in (plain, featured):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        completion = client.completions.create(model="default", prompt=mixed_prompts[1], max_tokens=24, temperature=0)
        chat = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Explain zip_longest"}],
            max_tokens=24,
            temperature=0,
        )
        stream = client.completions.create(model="default", prompt=mixed_prompts[2], max_tokens=24, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in stream)
        answers.append((completion.choices[0].text, chat.choices[0].message.content, streamed))
    assert answers[0] == answers[1]
    assert all(answers[0])


def test_a_chat_says_what_its_drafts_came_to(featured, capsys):
    """The example of docs/serving.md, as it stands there; and its counts are exact."""
    serving = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    example = serving[serving.index("      chat = client.chat") :].split("\n\n")[0]
    names = {
        "client": openai.OpenAI(base_url=featured.url + "/v1", api_key="none"),
        "messages": [{"role": "user", "content": "Explain zip_longest"}],
    }
    exec(textwrap.dedent(example), names)
    spec, written = names["spec"], names["chat"].usage.completion_tokens
    histogram, rows = spec["spec_correct_drafts_histogram"], spec["spec_cap_lens_histogram"]
    assert sum(histogram) == sum(rows) == spec["spec_verify_ct"]
    assert sum(i * steps for i, steps in enumerate(histogram)) == spec["spec_num_correct_drafts"]
    assert sum((i - 1) * steps for i, steps in enumerate(rows)) == spec["spec_num_selected_drafts"]
    # The prompt's pass brings the first token; what came behind the last one's stop was thrown away.
    assert 0 <= 1 + spec["spec_verify_ct"] + spec["spec_num_correct_drafts"] - written <= NUM_STEPS
    assert f"{spec['spec_num_correct_drafts']} accepted" in capsys.readouterr().out


@sgl.function
def _program(s, text):
    s += text + sgl.gen("first", max_tokens=12, temperature=0)
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"\n# {i}" + sgl.gen("branch", max_tokens=8, temperature=0)
    s += "\n" + branches[0]["branch"] + branches[1]["branch"]
    s += "\nNumber: " + sgl.gen("number", regex=r"[0-9]{3}", temperature=0)


@sgl.function
def _choice(s, text):
    s += text + sgl.select("choice", choices=["import", "class", "return"])


def test_frontend_language(plain, featured):
    """gen, fork and regex; select where upstream's endpoint supports it."""
    answers = []
    for server in (plain, featured):
        backend = sgl.RuntimeEndpoint(server.url)
        state = _program.run(text="def read(self):\n", backend=backend)
        choice = _choice.run(text="x = 1\n    ", backend=backend)["choice"]
        answers.append((state.text(), state["number"], choice))
    assert answers[0] == answers[1]
    assert answers[1][1].isdigit()


def test_engine_takes_tetris_arguments(tmp_path, plain, mixed_prompts):
    """sglang.Engine(speculative_tetris_...=...) in a process of its own."""
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import json
            import sglang

            def main():
                engine = sglang.Engine(
                    model_path={str(TARGET)!r}, dtype="float32", speculative_algorithm="TETRIS",
                    speculative_draft_model_path={str(DRAFT)!r}, speculative_num_steps=4,
                    speculative_tetris_capacity_tokens=6,
                )
                outputs = engine.generate({mixed_prompts[:4]!r}, dict(temperature=0, max_new_tokens=16))
                state = engine.get_server_info()["internal_states"][0]["tetris"]
                engine.shutdown()
                print("RESULT" + json.dumps([[o["text"] for o in outputs], state]))

            if __name__ == "__main__":
                main()
            """
        )
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    result = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert result, run.stdout[-2000:] + run.stderr[-4000:]
    texts, state = json.loads(result[0][6:])
    assert texts == [o["text"] for o in plain.generate_all(mixed_prompts[:4], max_new_tokens=16)]
    assert state["selected_tokens"] <= 6 * state["num_steps"]
    assert state["accepted_tokens"] > 0


def test_sglang_serve_and_bfloat16(tmp_path, mixed_prompts):
    """Which tokens follow differs with the rounding; that the draft is fed the right ones shows in what is accepted."""
    arguments = ["bfloat16" if a == "float32" else a for a in ARGUMENTS["overlap"]]
    log_path = tmp_path / "serve.log"
    sglang_command = [str(Path(sys.executable).with_name("sglang")), "serve"]
    with ServerProcess(arguments, log_path, entry_point=sglang_command, start_timeout_s=400) as server:
        client = Client(server.url, log_path)
        outputs = client.generate_all(mixed_prompts[:8], max_new_tokens=24, ignore_eos=True)
        state = client.tetris_state()
    assert all(o["meta_info"]["completion_tokens"] == 24 for o in outputs)
    assert state["accepted_tokens"] > 0.3 * state["selected_tokens"]
