"""What a comparison is made of: arms and their flags, options, prompts and arrivals. No server, no clock."""

import json
from itertools import chain, pairwise
from pathlib import Path

import pytest
from bench_samples import OPTIONS, make_settings

from tetris_sglang.bench import command
from tetris_sglang.bench.arms import FAMILIES, Arm, group_arms, order_arms
from tetris_sglang.bench.measuring import bench_serving_arguments, run_bench_serving
from tetris_sglang.bench.settings import FULL, build_settings
from tetris_sglang.bench.workloads import (
    GROUP_SIZE,
    PREFIX_CHARS,
    WORKLOADS,
    Dataset,
    ShippedPrompts,
    extend_prompts,
    write_dataset,
)
from tetris_sglang.pair import PAIR, read_prompts

# -- arms, groups, order -------------------------------------------------------------------------------------


def test_flags_verify_k_and_draft_k_and_extra():
    flags = Arm("tetris", 4, 2).flags("draft", phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "6"
    assert flags[flags.index("--speculative-tetris-capacity-per-request") + 1] == "4"
    assert "--speculative-tetris-phase-times" not in flags
    flags = Arm("standalone", 4).flags("draft", phase_times=True)
    assert flags[flags.index("--speculative-num-steps") + 1] == "4"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "5"
    assert Arm("none").flags("draft", phase_times=True) == []


def test_an_absolute_capacity_is_an_arm_of_its_own():
    settings = make_settings(arms="none,standalone,tetris", k="none", capacity_tokens="8,32", num_steps=5)
    arms = settings.build_arms()
    assert [arm.name for arm in arms] == ["none", "tetris C=8, D=5", "tetris C=32, D=5"]
    flags = arms[2].flags("draft", phase_times=False)
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-tetris-capacity-tokens") + 1] == "32"
    assert "--speculative-tetris-capacity-per-request" not in flags


def test_other_drafts_and_trees_are_arms_of_their_own():
    settings = make_settings(
        arms="none,standalone,tetris", k="2,6", extra="4", capacity_tokens="none", num_steps=3,
        drafts="eagle3,ngram", topk="1,2",
    )  # fmt: skip
    arms = {arm.name: arm for arm in settings.build_arms()}
    assert list(arms) == [
        "none",
        *("EAGLE3 k=2", "tetris eagle3 k=2+4", "EAGLE3 k=6", "tetris eagle3 k=6+4"),
        *("EAGLE3 topk=2 k=6", "tetris eagle3 topk=2 k=6+4"),
        *("NGRAM k=2", "tetris ngram k=2+4", "NGRAM k=6", "tetris ngram k=6+4"),
        "tetris ngram topk=2 k=6+4",
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
    tree = flags("tetris eagle3 topk=2 k=6+4")
    assert tree["--speculative-num-draft-tokens"] == "11" and tree["--speculative-num-steps"] == "3"
    assert tree["--speculative-tetris-capacity-per-request"] == "6"
    assert "--speculative-draft-model-path" not in flags("tetris ngram k=2+4", None)


def test_every_flag_is_one_that_tetris_declares():
    from tetris_sglang.config import SETTINGS

    declared = {setting.flag for setting in SETTINGS}
    for family in ("tetris", "uniform", "random"):
        given = {f for f in Arm(family, 4, 2).flags("d", True) if f.startswith("--speculative-tetris-")}
        assert given and given <= declared


def test_every_group_has_the_reference_and_every_arm_is_in_one_group():
    arms = make_settings(arms="none,standalone,tetris,uniform", k="1,2", extra="1,2").build_arms()
    first = "none", "standalone k=1", "tetris k=1+1", "uniform k=1+1", "tetris k=1+2", "uniform k=1+2"
    assert tuple(arm.name for arm in arms[:6]) == first
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
        ({"workload": "poems"}, "--workload: no such poems"),
        ({"arrivals": "uniform"}, "--arrivals: no such uniform"),
        ({"request_rate": "1"}, "--request-rate: .* --arrivals poisson"),
        ({"arrivals": "poisson", "request_rate": "1,0"}, "--request-rate '1,0'"),
        ({"draft_paths": ("eagle",)}, "--draft 'eagle': give DRAFT=PATH"),
        ({"draft_paths": ("medusa=x",)}, "--draft: no such medusa"),
        ({"model_path": "m"}, "leave them out with --model-path"),
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
    assert [arm.name for arm in full] == ["full D=2", "full D=3", "full D=4"]
    flags = full[1].flags("draft", phase_times=False)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--speculative-num-steps"] == given["--speculative-tetris-capacity-per-request"] == "3"
    assert given["--speculative-tetris-selection"] == "tetris"


def test_in_full_every_node_of_a_tree_is_verified():
    settings = make_settings(
        arms="none,full", k="6", extra="4", num_steps=3, drafts="eagle", topk="2", capacity_tokens="none"
    )
    (_, arm) = settings.build_arms()
    flags = arm.flags("head", phase_times=False)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert arm.name == "full eagle topk=2 D=10" and given["--speculative-num-steps"] == "3"
    assert given["--speculative-num-draft-tokens"] == "11"  # the root, too
    assert given["--speculative-tetris-capacity-per-request"] == "10"


def test_adaptive_takes_a_head_and_leaves_the_steps_to_sglang():
    arms = make_settings(arms="none,adaptive", drafts="standalone").build_arms()
    assert [arm.name for arm in arms] == ["none", "adaptive eagle"]
    assert arms[1].flags("head", phase_times=True) == [
        *(
            "--speculative-algorithm",
            "EAGLE",
            "--speculative-draft-model-path",
            "head",
            "--speculative-adaptive",
        ),
    ]
    arms = make_settings(arms="none,adaptive", drafts="ngram,eagle3,eagle", topk="1,2").build_arms()
    assert [arm.name for arm in arms] == ["none", "adaptive eagle3", "adaptive eagle"]


def test_every_family_has_arms_of_its_own_in_the_full_comparison():
    arms = build_settings(preset=FULL, options=OPTIONS | {"drafts": "standalone,eagle"}).build_arms()
    assert {arm.family for arm in arms} == set(FAMILIES)
    assert len({arm.name for arm in arms}) == len(arms)


def test_models_of_the_users_own_choose_drafts_and_dtype():
    own = make_settings(
        shape=None, model_path="org/target", draft_paths=("eagle3=head", "standalone=small=er")
    )
    assert (own.drafts, own.dtype, own.shape) == (("eagle3", "standalone"), "auto", "")
    assert make_settings(shape=None).shape == "cpu-100m" and make_settings().dtype == "float32"
    assert make_settings(draft_paths=("eagle=head",), drafts="ngram").drafts == ("ngram",)


# -- workloads -----------------------------------------------------------------------------------------------


def test_every_repeat_takes_other_prompts_of_every_kind(tmp_path):
    kinds = ("code", "prose", "chat")
    lines = [json.dumps({"kind": kind, "text": f"{kind} {i}"}) for kind in kinds for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    texts = read_prompts(tmp_path)
    repeats = [ShippedPrompts(texts).take(3, repeat) for repeat in range(5)]
    assert all(sorted(text.split()[0] for text in taken) == sorted(kinds) for taken in repeats)
    # The file lists each kind from short to long.
    assert [text for text in texts if text.startswith("prose")] != [f"prose {i}" for i in range(4)]
    assert sorted(chain(*repeats[:4])) == sorted(texts) and repeats[4] == repeats[0]
    assert sorted(read_prompts(tmp_path, {"prose"})) == [f"prose {i}" for i in range(4)]


def test_prompts_that_run_out_begin_again_a_word_later():
    texts = ["one two three", "four five six"]
    extended = extend_prompts(texts, 5)
    assert extended[:2] == texts and len(extended) == 6
    assert extended[2:] == ["two three", "five six", "three", "six"]
    assert extend_prompts(texts, 2) == texts


def test_the_dataset_is_one_that_sglang_bench_serving_reads(plugins, tmp_path):
    from sglang.benchmark.datasets.custom import sample_custom_requests

    class Tokenizer:
        def encode(self, text):
            return list(text)

    texts = [f"def f{i}():\n" for i in range(5)]
    dataset = write_dataset(texts, tmp_path / "dataset.jsonl")
    rows = sample_custom_requests(str(dataset), 5, Tokenizer(), fixed_output_len=64)
    assert sorted(row.prompt for row in rows) == texts
    assert {row.output_len for row in rows} == {64}


def test_a_shared_prefix_is_long_and_its_groups_alone():
    texts = [f"{i} starts here and goes on for a while" for i in range(50)]
    workload = ShippedPrompts(texts, shares_prefixes=True)
    seen = set()
    for repeat in range(3):
        prompts = workload.take(2 * GROUP_SIZE + 1, repeat)
        groups = [prompts[i : i + GROUP_SIZE] for i in range(0, len(prompts), GROUP_SIZE)]
        assert [len(group) for group in groups] == [GROUP_SIZE, GROUP_SIZE, 1]
        for group in groups:
            prefixes = {prompt[:PREFIX_CHARS] for prompt in group}
            assert len(prefixes) == 1 and len(set(group)) == len(group)
            seen |= {prefix[:20] for prefix in prefixes}
        assert all(len(prompt) > PREFIX_CHARS for prompt in prompts)
    # Others in every group of every repeat, from their first words on: no prefix is found in another group's cache.
    assert len(seen) == 9


def test_unlike_requests_keep_their_own_temperatures(plugins, tmp_path):
    from sglang.benchmark.datasets.openai_dataset import sample_openai_requests
    from transformers import AutoTokenizer

    workload = command.find_workload(make_settings(workload="unlike"), PAIR)
    arguments = workload.arguments(5, 0, tmp_path)
    rows = sample_openai_requests(
        arguments[-1], 5, AutoTokenizer.from_pretrained(PAIR / "target"), fixed_output_len=64
    )
    expected = [0.0, 1.0, 0.0, 1.0, 0.0]
    assert [row.extra_request_body["temperature"] for row in rows] == expected == workload.temperatures(5)
    assert [row.prompt[0]["content"] for row in rows] == workload.take(5, 0)
    assert {row.output_len for row in rows} == {64}
    # The backend given last counts, and the later arguments are the workload's.
    settings = make_settings(workload="unlike")
    given = bench_serving_arguments("URL", arguments, settings, settings.loads[0], 0.0, 0, tmp_path / "out")
    assert [given[i + 1] for i, word in enumerate(given) if word == "--backend"] == [
        "sglang",
        "sglang-oai-chat",
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_made_of_the_shipped_prompts(name, tmp_path):
    workload = command.find_workload(make_settings(workload=name), PAIR)
    arguments = workload.arguments(8, 0, tmp_path)
    assert arguments[-3] == ("openai" if name == "unlike" else "custom") and arguments[-2] == "--dataset-path"
    assert len(Path(arguments[-1]).read_text().splitlines()) == 8


def test_a_dataset_is_passed_on_as_it_is(tmp_path):
    settings = make_settings(
        dataset="my/file.json", dataset_name="sharegpt", load_flags="--sharegpt-context-len 99"
    )
    workload = command.find_workload(settings, tmp_path)  # the shipped prompts are not needed
    dataset = workload.arguments(8, 1, tmp_path)
    assert dataset == ["--dataset-name", "sharegpt", "--dataset-path", "my/file.json"]
    (closed, _) = settings.loads
    arguments = bench_serving_arguments("URL", dataset, settings, closed, 0.5, 2, tmp_path / "out")
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert given["--max-concurrency"] == "1" and given["--num-prompts"] == "4" and given["--seed"] == "2"
    assert given["--sharegpt-context-len"] == "99" and "--request-rate" not in arguments


def test_poisson_arrivals_are_bench_servings_own(tmp_path):
    settings = make_settings(arrivals="poisson", request_rate="0.5")
    arguments = bench_serving_arguments("URL", [], settings, settings.loads[0], 0.0, 0, tmp_path / "out")
    assert arguments[arguments.index("--request-rate") + 1] == "0.5" and "--max-concurrency" not in arguments


def test_bench_serving_knows_every_argument(plugins, tmp_path, monkeypatch):
    """Its parser is not to be had without running it: so it runs, with what reads the parsed arguments replaced."""
    from sglang.benchmark import serving

    parsed = []
    monkeypatch.setattr(serving, "run_benchmark", parsed.append)
    for options in ({}, {"arrivals": "poisson"}):
        settings = make_settings(**options)
        dataset = Dataset("random", "").arguments(4, 0, tmp_path)
        out = tmp_path / "out.json"
        arguments = bench_serving_arguments("http://x", dataset, settings, settings.loads[0], 0.0, 0, out)
        with pytest.raises(FileNotFoundError):  # nothing was written
            run_bench_serving(arguments)
    closed, poisson = parsed
    assert (closed.max_concurrency, closed.request_rate) == (1, float("inf"))
    assert (poisson.max_concurrency, poisson.request_rate) == (None, 1.0)
    assert closed.sharegpt_output_len == closed.random_output_len == 64


def test_automatic_arms_with_chains_that_go_on_from_the_text():
    settings = make_settings(arms="auto", num_steps=4, continued="0,5", drafts="eagle,ngram")
    arms = [arm for arm in settings.build_arms() if arm.family == "auto"]
    assert [arm.name for arm in arms] == ["auto eagle D=4", "auto eagle D=4+5", "auto ngram D=8"]
    flags = [arm.flags("folder", phase_times=False) for arm in arms[:2]]
    assert [one[-2:] for one in flags] == [["--speculative-num-draft-tokens", str(n)] for n in (5, 10)]
    assert "--speculative-num-draft-tokens" not in arms[2].flags(None, phase_times=False)
    with pytest.raises(ValueError, match="--continued '-1'"):
        make_settings(continued="-1")


@pytest.mark.parametrize("num_steps, name", [(4, "auto D=4+4"), (63, "auto D=63+1"), (64, "auto D=64")])
def test_automatic_chains_go_on_as_a_server_does_by_itself(num_steps, name):
    settings = make_settings(arms="auto", num_steps=num_steps)
    assert [arm.name for arm in settings.build_arms() if arm.family == "auto"] == [name]
