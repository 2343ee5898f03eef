"""What a comparison is made of: arms and their flags, options, prompts and arrivals. No server, no clock."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean

import pytest

from tests.tools.bench.samples import OPTIONS, fake_prompts, make_prompts, make_settings
from tetris_sglang.tools.bench.arms import FAMILIES, Arm, group_arms, order_arms
from tetris_sglang.tools.bench.measuring import bench_serving_arguments, run_bench_serving
from tetris_sglang.tools.bench.settings import FULL, QUICK, build_settings
from tetris_sglang.tools.bench.workloads import (
    GROUP_SIZE,
    MAX_CHARS,
    PREFIX_CHARS,
    WORKLOADS,
    Chats,
    Dataset,
    draw_length,
    find_workload,
)
from tetris_sglang.tools.prompts import Prompt

TOKENIZER = Path(__file__).resolve().parents[2] / "pair" / "target"

# -- arms, groups, order -------------------------------------------------------------------------------------


def test_flags_verify_k_and_draft_k_and_extra():
    flags = Arm("tetris", 4, 2).flags("draft", phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "6"
    assert flags[flags.index("--speculative-tetris-capacity-per-request") + 1] == "4"
    assert "--speculative-tetris-phase-times" not in flags
    flags = Arm("sglang", 4).flags("draft", phase_times=True)
    assert flags[flags.index("--speculative-num-steps") + 1] == "4"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "5"
    assert Arm("none").flags("draft", phase_times=True) == []


def test_an_absolute_capacity_is_an_arm_of_its_own():
    settings = make_settings(arms="none,sglang,tetris", k="none", capacity_tokens="8,32", num_steps=5)
    arms = settings.build_arms()
    assert [arm.name for arm in arms] == ["none", "tetris eagle3 C=8, D=5", "tetris eagle3 C=32, D=5"]
    flags = arms[2].flags("draft", phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-tetris-capacity-tokens") + 1] == "32"
    assert "--speculative-tetris-capacity-per-request" not in flags


def test_other_drafts_and_trees_are_arms_of_their_own():
    settings = make_settings(
        arms="none,sglang,tetris", k="2,6", extra="4", capacity_tokens="none", num_steps=3,
        drafts="eagle3,ngram", topk="1,2",
    )  # fmt: skip
    arms = {arm.name: arm for arm in settings.build_arms()}
    assert list(arms) == [
        "none",
        # SGLang's own alone drafts trees.
        *("EAGLE3 k=2", "tetris eagle3 k=2+4", "EAGLE3 k=6", "EAGLE3 topk=2 k=6", "tetris eagle3 k=6+4"),
        # N-grams have no trees.
        *("NGRAM k=2", "tetris ngram k=2+4", "NGRAM k=6", "tetris ngram k=6+4"),
    ]

    def flags(name, draft="head"):
        given = arms[name].flags(draft, phase_times=False)
        return dict(zip(given[::2], given[1::2], strict=True))

    assert flags("EAGLE3 topk=2 k=6") == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "head",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "2",
        "--speculative-num-draft-tokens": "7",
    }
    chain = flags("tetris eagle3 k=6+4")
    assert chain["--speculative-num-steps"] == "10" and chain["--speculative-tetris-capacity-per-request"] == "6"
    assert "--speculative-draft-model-path" not in flags("tetris ngram k=2+4", None)


def test_sglang_verifies_whole_blocks_of_a_dflash_draft():
    settings = make_settings(arms="none,sglang", k="5", num_steps=3, drafts="dflash", topk="1,2")
    assert [arm.name for arm in settings.build_arms()] == ["none", "DFLASH k=5"]
    assert settings.build_arms()[1].flags("draft", phase_times=False) == [
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "draft", "--speculative-num-draft-tokens", "6",
    ]  # fmt: skip


def test_every_flag_is_one_that_tetris_declares():
    from tetris_sglang.config import SETTINGS

    declared = {setting.flag for setting in SETTINGS}
    for family in ("tetris", "uniform", "random"):
        given = {f for f in Arm(family, 4, 2).flags("d", True) if f.startswith("--speculative-tetris-")}
        assert given and given <= declared


def test_every_group_has_the_reference_and_every_arm_is_in_one_group():
    arms = make_settings(arms="none,sglang,tetris,uniform", k="1,2", extra="1,2").build_arms()
    chosen = [f"{family} eagle3 k=1+{extra}" for extra in (1, 2) for family in ("tetris", "uniform")]
    assert [arm.name for arm in arms[:6]] == ["none", "EAGLE3 k=1", *chosen]
    groups = group_arms(arms, live_servers=4)
    assert all(group[0] == arms[0] and len(group) <= 4 for group in groups)
    assert [arm for group in groups for arm in group[1:]] == arms[1:]
    assert group_arms(arms[:1], live_servers=4) == [arms[:1]]
    assert group_arms(arms, live_servers=1) == [arms]


def test_order_is_a_permutation_that_changes_from_repeat_to_repeat():
    arms = [Arm("tetris", k) for k in range(1, 5)]
    orders = [order_arms(arms, repeat) for repeat in range(4)]
    assert all(sorted(order, key=lambda a: a.k) == arms for order in orders)
    assert len({order[0] for order in orders}) > 1
    follows = {tuple(pair) for order in orders for pair in pairwise(order)}
    assert any((b, a) in follows for a, b in follows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": "none,eagle"}, "eagle"),
        ({"arms": "none,standalone"}, "--arms: no such standalone"),
        ({"drafts": "perfect"}, "--drafts: no such perfect"),
        ({"lengths": "unlike"}, "--lengths: no such unlike; there are drawn, equal"),
        ({"workload": "poems"}, "--workload: no such poems"),
        ({"arrivals": "uniform"}, "--arrivals: no such uniform"),
        ({"request_rate": "1"}, "--request-rate: .* --arrivals poisson"),
        ({"arrivals": "poisson", "request_rate": "1,0"}, "--request-rate '1,0'"),
        ({"draft_paths": ("eagle",)}, "--draft 'eagle': give DRAFT=PATH"),
        ({"draft_paths": ("medusa=x",)}, "--draft: no such medusa"),
        ({"dataset": "file"}, "--dataset-name"),
        ({"k": "1,x"}, "--k '1,x'"),
        ({"k": "0"}, "--k '0'"),
        ({"temperature": "-1"}, "--temperature '-1'"),
        ({"live_servers": 0}, "--live-servers 0"),
        ({"concurrency": "none"}, "--concurrency 'none'"),
        ({"num_steps": 0}, "--num-steps 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"waves": 0}, "--waves 0"),
        ({"output_len": 3}, "--output-len 3"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_settings(**options)


def test_prompts_are_several_waves_or_some_seconds_of_arrivals():
    settings = make_settings()
    assert [load.num_prompts(settings.min_prompts, settings.waves) for load in settings.loads] == [4, 64]
    steady = make_settings(waves=8)
    assert [load.num_prompts(steady.min_prompts, steady.waves) for load in steady.loads] == [8, 128]
    poisson = make_settings(arrivals="poisson", request_rate="0.2,2.5")
    assert [load.num_prompts(poisson.min_prompts, poisson.waves) for load in poisson.loads] == [4, 25]


def test_the_same_drafts_are_verified_in_full_once_per_depth():
    arms = make_settings(arms="none,tetris,full", k="1,2", extra="1,2", capacity_tokens="none").build_arms()
    full = [arm for arm in arms if arm.family == "full"]
    assert [arm.name for arm in full] == ["full eagle3 D=2", "full eagle3 D=3", "full eagle3 D=4"]
    flags = full[1].flags("draft", phase_times=False)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--speculative-num-steps"] == given["--speculative-tetris-capacity-per-request"] == "3"
    assert given["--speculative-tetris-selection"] == "tetris"


def test_adaptive_takes_a_head_and_leaves_the_steps_to_sglang():
    arms = make_settings(arms="none,adaptive", drafts="standalone").build_arms()
    assert [arm.name for arm in arms] == ["none", "adaptive eagle3"]
    assert arms[1].flags("head", phase_times=True) == [
        *(
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            "head",
            "--speculative-adaptive",
        )
    ]
    arms = make_settings(arms="none,adaptive", drafts="ngram,eagle3,eagle", topk="1,2").build_arms()
    assert [arm.name for arm in arms] == ["none", "adaptive eagle3", "adaptive eagle"]


def test_every_family_has_arms_of_its_own_in_the_full_comparison():
    arms = build_settings(preset=FULL, options=OPTIONS | {"drafts": "standalone,eagle"}).build_arms()
    assert {arm.family for arm in arms} == set(FAMILIES)
    assert len({arm.name for arm in arms}) == len(arms)


def test_the_quick_comparison_is_none_sglang_and_the_default():
    quick = build_settings(preset=QUICK, options=OPTIONS | {"concurrency": None})
    assert [arm.name for arm in quick.build_arms()] == ["none", "auto eagle3 D=6", "EAGLE3 k=3"]
    assert (quick.concurrency, quick.temperature) == ((1, 4), (0.0,))
    full = build_settings(preset=FULL, options=OPTIONS | {"concurrency": None})
    assert (full.concurrency, full.temperature) == ((1, 4, 16), (0.0, 1.0))


@pytest.mark.parametrize(
    ("draft", "own", "ours"),
    [
        ("ngram", "NGRAM k=3", "auto ngram D=12"),
        ("standalone", "STANDALONE k=3", "auto standalone D=6"),
        ("useless", "EAGLE3 useless k=3", "auto useless D=6"),
    ],
)
def test_an_arm_is_named_after_its_draft_and_sglangs_own_after_its_algorithm(draft, own, ours):
    arms = make_settings(arms="sglang,auto", k="3", drafts=draft).build_arms()
    assert [arm.name for arm in arms] == ["none", ours, own]
    assert arms[2].flags("folder", False)[:2] == ["--speculative-algorithm", own.split()[0]]


def test_models_of_the_users_own_choose_drafts_and_dtype():
    own = make_settings(model_path="org/target", draft_paths=("eagle3=head", "standalone=small=er"))
    assert (own.drafts, own.dtype) == (("eagle3", "standalone"), "auto")
    assert (make_settings().drafts, make_settings().dtype) == (("eagle3",), "float32")
    assert make_settings(draft_paths=("eagle=head",), drafts="ngram").drafts == ("ngram",)


# -- workloads -----------------------------------------------------------------------------------------------


def read_rows(workload, count, tmp_path, repeat=0):
    """As sglang.bench_serving reads them, and the arguments that say where."""
    from sglang.benchmark.datasets.openai_dataset import sample_openai_requests
    from transformers import AutoTokenizer

    arguments = workload.arguments(count, repeat, 0.0, tmp_path)
    path = arguments[arguments.index("--dataset-path") + 1]
    return sample_openai_requests(path, count, AutoTokenizer.from_pretrained(TOKENIZER)), arguments


def test_every_repeat_takes_other_prompts():
    prompts = make_prompts("chat", 12)
    repeats = [Chats(prompts, 0, 96).take(3, repeat) for repeat in range(5)]
    assert [*chain(*repeats[:4])] == prompts and repeats[4] == repeats[0]


def test_prompts_are_shuffled_and_long_ones_left_out(monkeypatch):
    too_long = Prompt("long", "sharegpt", "x" * (MAX_CHARS + 1))
    just_right = Prompt("right", "sharegpt", "x" * MAX_CHARS)
    fake_prompts(monkeypatch, (too_long, just_right))
    orders = [find_workload(make_settings(seed=seed)).prompts for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == sorted([*make_prompts("sharegpt"), just_right]) for order in orders)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_written_as_chats(name, plugins, tmp_path, monkeypatch):
    fake_prompts(monkeypatch)
    settings = make_settings(workload=name, concurrency="1,4")
    workload = find_workload(settings)
    rows, arguments = read_rows(workload, 6, tmp_path, repeat=1)
    taken = workload.take(6, 1)
    assert [row.prompt for row in rows] == [[{"role": "user", "content": p.text}] for p in taken]
    assert [row.output_len for row in rows] == [draw_length(p.id, 96, 0) for p in taken]
    sources = [prompt.id.partition("/")[0].partition("-")[0] for prompt in taken]
    if name in ("sharegpt", "humaneval"):
        assert set(sources) == {name}
    elif name != "questions":
        assert sources[::3] == ["sharegpt"] * 2 and sources[1::3] == ["humaneval"] * 2
    # The backend given last counts, and no fixed length replaces the prompts' own.
    given = bench_serving_arguments("URL", arguments, settings, settings.loads[0], 0.0, 0, tmp_path / "out")
    backends = [given[i + 1] for i, word in enumerate(given) if word == "--backend"]
    assert backends == ["sglang", "sglang-oai-chat"]
    assert "--sharegpt-output-len" not in given and "--disable-ignore-eos" in given
    sampled = bench_serving_arguments("URL", arguments, settings, settings.loads[0], 0.7, 0, tmp_path / "out")
    assert "--disable-ignore-eos" not in sampled, "every arm's answers would end elsewhere"


def test_lengths_are_the_prompts_own_and_the_same_for_every_arm():
    drawn = {f"prompt {i}": draw_length(f"prompt {i}", 96, 0) for i in range(2000)}
    assert (min(drawn.values()), max(drawn.values())) == (32, 160) and abs(mean(drawn.values()) - 96) < 3
    assert all(draw_length(name, 96, 0) == length for name, length in drawn.items())
    assert sum(draw_length(name, 96, 1) != length for name, length in drawn.items()) > 1900


def test_equal_lengths_go_past_the_end_of_an_answer(plugins, tmp_path):
    settings = make_settings(lengths="equal", output_len=50)
    rows, arguments = read_rows(Chats(make_prompts("chat"), 0, 50, "equal"), 8, tmp_path)
    assert {row.output_len for row in rows} == {50}
    given = bench_serving_arguments("URL", arguments, settings, settings.loads[0], 0.0, 0, tmp_path / "out")
    assert "--disable-ignore-eos" not in given


def test_no_run_asks_a_prompt_twice(monkeypatch):
    fake_prompts(monkeypatch)
    few = {"workload": "questions", "concurrency": "1,16"}
    with pytest.raises(ValueError, match="--workload questions: a run of 64 prompts .* its 48 twice.* --waves"):
        find_workload(make_settings(**few))
    assert len({p.id for p in find_workload(make_settings(**few, waves=3)).take(48, 1)}) == 48
    # The shorter ones come again in a mixture, but not within a run.
    mixed = find_workload(make_settings(workload="mixed", concurrency="36"))
    assert len({p.id for p in mixed.take(144, 0)}) == 144 and len(mixed.prompts) == 300
    with pytest.raises(ValueError, match="its 144 twice"):
        find_workload(make_settings(workload="mixed", concurrency="37"))


def test_a_shared_prefix_is_long_and_its_groups_alone():
    workload = Chats(make_prompts("chat", 50), 0, 96, shares_prefixes=True)
    seen = set()
    for repeat in range(3):
        prompts = [prompt.text for prompt in workload.take(2 * GROUP_SIZE + 1, repeat)]
        groups = [prompts[i : i + GROUP_SIZE] for i in range(0, len(prompts), GROUP_SIZE)]
        assert [len(group) for group in groups] == [GROUP_SIZE, GROUP_SIZE, 1]
        for group in groups:
            prefixes = {prompt[:PREFIX_CHARS] for prompt in group}
            assert len(prefixes) == 1 and len(set(group)) == len(group)
            seen |= {prefix[:10] for prefix in prefixes}
        assert all(len(prompt) > PREFIX_CHARS for prompt in prompts)
    # Others in every group of every repeat, from their first words on: no prefix is found in another group's cache.
    assert len(seen) == 9


def test_unlike_requests_keep_their_own_temperatures(plugins, tmp_path, monkeypatch):
    fake_prompts(monkeypatch)
    workload = find_workload(make_settings(workload="unlike"))
    rows, _ = read_rows(workload, 5, tmp_path)
    expected = [0.0, 1.0, 0.0, 1.0, 0.0]
    assert [row.extra_request_body for row in rows] == [{"temperature": t} for t in expected]
    assert workload.temperatures(5) == expected
    assert find_workload(make_settings(workload="mixed")).temperatures(2) == [None, None]


def test_a_dataset_is_passed_on_as_it_is(tmp_path):
    settings = make_settings(
        dataset="my/file.json",
        dataset_name="sharegpt",
        load_flags="--sharegpt-context-len 99",
        lengths="equal",
    )
    dataset = find_workload(settings).arguments(8, 1, 0.5, tmp_path)
    assert dataset[:4] == ["--dataset-name", "sharegpt", "--dataset-path", "my/file.json"]
    (closed, _) = settings.loads
    arguments = bench_serving_arguments("URL", dataset, settings, closed, 0.5, 2, tmp_path / "out")
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert given["--max-concurrency"] == "1" and given["--num-prompts"] == "4" and given["--seed"] == "2"
    assert given["--sharegpt-context-len"] == "99" and "--request-rate" not in arguments
    assert given["--sharegpt-output-len"] == "96" and given["--temperature"] == "0.5"
    assert given["--backend"] == "sglang"


def test_chats_of_a_users_own_come_in_another_order_each_time_at_the_runs_temperature(tmp_path):
    own = tmp_path / "chats.jsonl"
    own.write_text("".join(json.dumps({"messages": [str(i)], "temperature": 0.3}) + "\n" for i in range(30)))
    asked = []
    for repeat in (0, 0, 1):
        arguments = Dataset("openai", str(own), 96).arguments(8, repeat, 0.5, tmp_path)
        assert arguments[-4:-1] == ["--backend", "sglang-oai-chat", "--extra-request-body"]
        asked.append(Path(arguments[3]).read_text())
    assert asked[0] == asked[1] != asked[2] and sorted(asked[0]) == sorted(asked[2])
    assert "temperature" not in asked[0] and json.loads(arguments[-1])["temperature"] == 0.5


def test_poisson_arrivals_are_bench_servings_own(tmp_path):
    settings = make_settings(arrivals="poisson", request_rate="0.5")
    arguments = bench_serving_arguments("URL", [], settings, settings.loads[0], 0.0, 0, tmp_path / "out")
    assert arguments[arguments.index("--request-rate") + 1] == "0.5" and "--max-concurrency" not in arguments


def test_bench_serving_knows_every_argument(plugins, tmp_path, monkeypatch):
    """Its parser is not to be had without running it: so it runs, with what reads the parsed arguments replaced."""
    from sglang.benchmark import serving

    parsed = []
    monkeypatch.setattr(serving, "run_benchmark", parsed.append)
    chats = Chats(make_prompts("chat"), 0, 96)
    for options, workload in (({}, Dataset("random", "", 96)), ({"arrivals": "poisson"}, chats)):
        settings = make_settings(**options)
        dataset = workload.arguments(4, 0, 0.5, tmp_path)
        out = tmp_path / "out.json"
        arguments = bench_serving_arguments("http://x", dataset, settings, settings.loads[0], 0.0, 0, out)
        with pytest.raises(FileNotFoundError):  # nothing was written
            run_bench_serving(arguments)
    closed, poisson = parsed
    assert (closed.max_concurrency, closed.request_rate) == (1, float("inf"))
    assert (poisson.max_concurrency, poisson.request_rate) == (None, 1.0)
    assert closed.sharegpt_output_len == closed.random_output_len == 96
    assert (poisson.backend, poisson.sharegpt_output_len, poisson.disable_ignore_eos) == (
        "sglang-oai-chat",
        None,
        True,
    )
    body = {"temperature": 0.5, "stream_options": {"include_usage": True}}
    assert json.loads(poisson.extra_request_body) == body


def test_chats_are_sent_with_their_parameters_and_counted_by_what_was_written(plugins, tmp_path):
    """By sglang.bench_serving, to a server that ends every answer after two of its tokens."""
    received = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            answers = {
                "/v1/models": {"data": [{"id": "model"}]},
                "/model_info": {"model_path": str(TOKENIZER)},
            }
            self.answer(json.dumps(answers.get(self.path, {"internal_states": [{}]})))

        def do_POST(self):
            received.append(asked := json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("two", " words")]
            if asked["stream_options"]["include_usage"]:
                chunks.append({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9}})
            self.answer("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

        def answer(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *given):
            pass

    settings = make_settings(concurrency="2")
    workload = Chats(make_prompts("chat"), 0, 96, in_turn=(0.0, None))
    dataset = workload.arguments(8, 0, 0.7, tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        arguments = bench_serving_arguments(url, dataset, settings, settings.loads[0], 0.0, 0, tmp_path / "out")
        result = run_bench_serving(arguments)
        server.shutdown()
    assert result["output_lens"] == [2] * 8 and result["total_output_tokens"] == 16
    taken = {prompt.text: workload.choose_length(prompt) for prompt in workload.take(8, 0)}
    assert {r["messages"][0]["content"]: r["max_completion_tokens"] for r in received} == taken
    assert sorted(r["temperature"] for r in received) == [0.0] * 4 + [0.7] * 4
    assert not any(r["ignore_eos"] for r in received)


def test_automatic_arms_leave_the_shape_to_the_server():
    settings = make_settings(arms="auto", num_steps=4, drafts="eagle,ngram")
    arms = [arm for arm in settings.build_arms() if arm.family == "auto"]
    assert [arm.name for arm in arms] == ["auto eagle D=4", "auto ngram D=8"]
    for arm in arms:
        assert "--speculative-num-draft-tokens" not in arm.flags("folder", phase_times=False)
    settings = make_settings(arms="auto", num_steps=4, drafts="eagle,ngram", num_draft_tokens="5,13")
    arms = [arm for arm in settings.build_arms() if arm.family == "auto"]
    assert [arm.name for arm in arms] == ["auto eagle D=4", "auto eagle D=4 of 5", "auto eagle D=4 of 13", "auto ngram D=8"]
    assert arms[2].flags("folder", phase_times=False)[-2:] == ["--speculative-num-draft-tokens", "13"]


def test_variants_of_the_default_differ_in_one_setting():
    settings = make_settings(arms="none,auto", variants="calibration=off,shared-texts=on")
    _, default, *others = settings.build_arms()
    assert [arm.name for arm in others] == [f"{default.name} calibration=off", f"{default.name} shared-texts=on"]
    shared = others[1].flags("head", False)
    assert shared == [*default.flags("head", False), "--speculative-tetris-shared-texts", "on"]
    for bad, message in (("speed=1", "no such speed"), ("draft", "give NAME=VALUE")):
        with pytest.raises(ValueError, match=message):
            make_settings(variants=bad)
