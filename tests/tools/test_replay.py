"""Selection rules on recorded steps, against brute force."""

import itertools
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tetris_sglang.selection import select_oracle
from tetris_sglang.tools.cli import app
from tetris_sglang.tools.replay import (
    RULES,
    Batch,
    complete_steps,
    draw_figure,
    make_batches,
    print_study,
    rank,
    select,
    study,
)
from tetris_sglang.trace import Trace, open_for_writing, row_type


def make_chains(seed: int, batch: int, depth: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    # Two survivals of few values: ties.
    survival, raw = ((torch.randint(1, 5, (batch, depth), generator=draw) / 4).cumprod(dim=1) for _ in range(2))
    num_accepted = torch.randint(0, depth + 1, (batch,), generator=draw)
    accepted = torch.arange(depth) < num_accepted[:, None]
    return Batch(raw, survival, accepted, torch.full((batch,), depth))


def make_trees(seed: int, batch: int, nodes: int) -> tuple[Batch, list[list[int]]]:
    """Random trees in the order of `Proposal`, some with fewer nodes; and each node's parent, -1 for the root."""
    draw = np.random.default_rng(seed)
    raw, survival, accepted = (np.zeros((batch, nodes), dtype) for dtype in (np.float32, np.float32, bool))
    num_nodes, parents = draw.integers(1, nodes + 1, batch), []
    for request, count in enumerate(num_nodes):
        above = [int(draw.integers(-1, node)) for node in range(count)]
        scores = np.zeros((2, count))
        for node, parent in enumerate(above):
            scores[:, node] = draw.integers(1, 4, 2) / 4 * (scores[:, parent] if parent >= 0 else 1)
        order = np.argsort(-scores[1], kind="stable")
        place = {int(node): i for i, node in enumerate(order)} | {-1: -1}
        parents.append([place[above[node]] for node in order])
        raw[request, :count], survival[request, :count] = scores[:, order]
        # A random path from the root.
        last = -1
        while children := [i for i, parent in enumerate(parents[-1]) if parent == last]:
            if draw.random() < 0.3:
                break
            last = int(draw.choice(children))
            accepted[request, last] = True
    return Batch(*map(torch.from_numpy, (raw, survival, accepted, num_nodes))), parents


def best_accepted(batch: Batch, parents: list[list[int]], capacity: int) -> int:
    """The most accepted nodes of any choice that takes no node without its parent, by trying all."""
    most = [0] * (capacity + 1)
    for request, above in enumerate(parents):
        by_size = {}
        for size in range(min(capacity, len(above)) + 1):
            for nodes in itertools.combinations(range(len(above)), size):
                if all(above[node] in (-1, *nodes) for node in nodes):
                    gain = sum(bool(batch.accepted[request, node]) for node in nodes)
                    by_size[size] = max(gain, by_size.get(size, 0))
        most = [
            max(most[total - size] + gain for size, gain in by_size.items() if size <= total) for total in range(capacity + 1)
        ]
    return most[capacity]


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_is_the_best_choice_there_is(seed):
    batch, parents = make_trees(seed, batch=3, nodes=6)
    for capacity in range(1, 15):
        assert select(rank(RULES["oracle"], batch), capacity).accepted == best_accepted(batch, parents, capacity)


@pytest.mark.parametrize("seed", range(20))
def test_on_chains_the_oracle_is_the_library_s_and_fills_up(seed):
    batch = make_chains(seed, batch=5, depth=4)
    for capacity in range(1, 24):
        selected = select(rank(RULES["oracle"], batch), capacity)
        plain = select_oracle(batch.survival, capacity, num_accepted=batch.accepted.sum(dim=1))
        assert selected.accepted == plain.sum()
        assert selected.verified == min(capacity, 20) >= plain.sum()


@pytest.mark.parametrize("seed", range(20))
def test_every_rule_verifies_as_many_and_none_beats_the_oracle(seed):
    trees, _ = make_trees(seed, batch=4, nodes=7)
    for batch in (trees, make_chains(seed, batch=4, depth=5)):
        for capacity in range(1, 30):
            chosen = {name: select(rank(rule, batch), capacity) for name, rule in RULES.items()}
            assert {selected.verified for selected in chosen.values()} == {min(capacity, int(batch.num_nodes.sum()))}
            assert max(selected.accepted for selected in chosen.values()) == chosen["oracle"].accepted


@pytest.mark.parametrize("name, scores", [("tetris raw", "raw"), ("tetris calibrated", "survival")])
@pytest.mark.parametrize("seed", range(10))
def test_tetris_takes_the_largest_survivals_of_the_batch(name, scores, seed):
    trees, _ = make_trees(seed, batch=4, nodes=7)
    for batch in (trees, make_chains(seed, batch=4, depth=5)):
        values = getattr(batch, scores)
        inside = torch.arange(values.shape[1]) < batch.num_nodes[:, None]
        ranked = values[inside].sort(descending=True).values
        for capacity in range(1, len(ranked) + 1):
            assert select(rank(RULES[name], batch), capacity).score == pytest.approx(float(ranked[:capacity].sum()))


def test_one_batch_by_hand():
    """Chains of two; the draft is sure of the first request and wrong."""
    raw = torch.tensor([[0.9, 0.8], [0.5, 0.4]])
    survival = torch.tensor([[0.4, 0.2], [0.7, 0.6]])
    accepted = torch.tensor([[False, False], [True, True]])
    batch = Batch(raw, survival, accepted, torch.tensor([2, 2]))
    chosen = {name: select(rank(rule, batch), 2) for name, rule in RULES.items()}
    assert {name: selected.accepted for name, selected in chosen.items() if name != "random"} == {
        "uniform": 1, "tetris raw": 0, "tetris calibrated": 2, "oracle": 2,
    }  # fmt: skip
    assert chosen["tetris calibrated"].score == pytest.approx(1.3)


def make_trace(num_steps: int = 40, batch: int = 6, depth: int = 4, seed: int = 0, hidden=()) -> Trace:
    """Chains whose calibrated survivals are right and whose raw ones say little.

    Args:
        hidden: steps in which one draft was not verified.
    """
    draw = np.random.default_rng(seed)
    count = num_steps * batch
    chances = draw.beta(1.5, 1, (count, depth))
    accepted = (draw.random((count, depth)) < chances).cumprod(axis=1).astype(bool)
    steps = np.repeat(np.arange(num_steps) * 2, batch)  # plain steps in between
    selected = np.full(count, depth)
    for step in hidden:
        selected[step * batch + 1] -= 1
    return Trace(
        {"num_nodes": depth},
        steps,
        np.tile(np.arange(batch), num_steps),
        np.full(count, depth),
        selected,
        draw.beta(1.5, 1, (count, depth)).cumprod(axis=1).astype(np.float32),
        chances.cumprod(axis=1).astype(np.float32),
        np.tile(np.arange(1, depth + 1), (count, 1)),
        accepted,
    )


def test_a_study_adds_up():
    trace = make_trace()
    result = study(trace, "invented", [1.0, 4.0], repeats=2)
    assert (result.num_steps, result.num_rows, result.left_out) == (40, 240, 0)
    by_rule = {rule: result.find(rule, 1.0) for rule in RULES}
    assert {figures.verified for figures in by_rule.values()} == {2 * 240}
    # By hand: the first draft of every request.
    uniform = by_rule["uniform"]
    assert uniform.accepted == 2 * trace.accepted[:, 0].sum()
    assert uniform.success_rate == pytest.approx(trace.accepted[:, 0].mean())
    assert uniform.emitted_per_row == pytest.approx((240 + trace.accepted[:, 0].sum()) / 480)
    assert uniform.oracle_share == pytest.approx(uniform.success_rate / by_rule["oracle"].success_rate)
    # With everything verified there is nothing to choose.
    assert len({result.find(rule, 4.0).accepted for rule in RULES}) == 1


def test_survivals_that_are_right_promise_what_they_keep_and_choose_better():
    result = study(make_trace(num_steps=400), "invented", [1.0], repeats=1)
    by_rule = {rule: result.find(rule, 1.0) for rule in RULES}
    calibrated, raw = by_rule["tetris calibrated"], by_rule["tetris raw"]
    assert calibrated.success_rate == pytest.approx(calibrated.promised, abs=0.02)
    assert calibrated.accepted > 1.1 * max(by_rule[rule].accepted for rule in ("uniform", "random", "tetris raw"))
    assert abs(raw.success_rate - raw.promised) > 0.05


def test_steps_that_are_not_all_verified_are_left_out():
    result = study(make_trace(hidden=(3, 17)), "invented", [1.0])
    assert (result.num_steps, result.num_rows, result.left_out) == (38, 228, 2)
    steps, _ = complete_steps(make_trace(hidden=(3, 17)))
    assert not {3 * 6 + 1, 17 * 6 + 1} & set(torch.cat(steps).tolist())


def test_rows_are_shuffled_into_batches_of_the_size_asked_for():
    trace = make_trace()
    result = study(trace, "invented", [1.0], batch_size=32, repeats=3)
    figures = result.find("uniform", 1.0)
    assert figures.requests == figures.verified == 3 * (240 // 32) * 32
    # More to choose from.
    small = study(trace, "invented", [1.0], batch_size=2, repeats=3)
    assert small.find("tetris calibrated", 1.0).success_rate < result.find("tetris calibrated", 1.0).success_rate


def test_the_seed_decides_the_draws_and_nothing_else_does():
    def accepted(seed: int) -> list[int]:
        figures = study(make_trace(), "invented", [1.0], repeats=1, seed=seed).figures
        return [f.accepted for f in figures if f.rule == "random"]

    torch.manual_seed(5)
    first, state = accepted(0), torch.get_rng_state()
    torch.rand(3)
    assert accepted(0) == first != accepted(1)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"repeats": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 241}, "240 rows of 40 steps"),
        ({"capacities": [0.0]}, "above 0"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        study(make_trace(), "invented", **arguments)


def test_a_trace_without_a_complete_step():
    with pytest.raises(ValueError, match="invented: 0 rows of 2 steps .* everything verified"):
        study(make_trace(2, hidden=(0, 1)), "invented")


def test_what_is_shown():
    console = Console(width=120, record=True)
    result = study(make_trace(hidden=(3,)), "invented", [1.0, 2.0])
    print_study(result, console)
    text = console.export_text()
    assert "invented: 39 steps, 6.0 requests each; 1 steps left out" in text
    figures = result.find("tetris raw", 2.0)
    assert f"{figures.success_rate:.3f} ({figures.oracle_share:.0%})" in text
    assert f"{figures.emitted_per_row:.3f}" in text


def write_file(path, trace: Trace):
    rows = np.zeros(len(trace.steps), row_type(4))
    for name, values in zip(("step", "request", "depth", "selected"), trace[1:5], strict=True):
        rows[name] = values
    rows["raw"], rows["survival"], rows["node_depths"] = trace.raw, trace.survival, trace.node_depths
    rows["accepted"] = np.packbits(trace.accepted, axis=1, bitorder="little")
    with open_for_writing(path, 4, draft="ngram") as file:
        file.write(rows.tobytes())
    return str(path)


def test_the_command(tmp_path):
    files = [write_file(tmp_path / name, make_trace(seed=i)) for i, name in enumerate(("a.trace.gz", "b.trace"))]
    run = CliRunner().invoke
    result = run(
        app,
        ["replay", *files, "--json", "--capacity-per-request", "1,2.5", "--plot", str(tmp_path / "p.png")],
    )
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.output)
    assert (first["name"], second["name"]) == ("a", "b") and first["header"]["draft"] == "ngram"
    assert [(f["rule"], f["capacity_per_request"]) for f in first["figures"]] == [
        (rule, capacity) for rule in RULES for capacity in (1.0, 2.5)
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "tetris calibrated" in run(app, ["replay", files[0]]).output
    for arguments, said in (
        (["--capacity-per-request", "1,x"], "1,x"),
        (["--repeats", "0"], "at least 1"),
        ([str(tmp_path / "p.png")], "is no trace"),
        (["missing"], "does not exist"),
    ):
        result = run(app, ["replay", files[0], *arguments])
        assert result.exit_code == 2 and said in " ".join(result.output.replace("│", "").split()), result.output


def test_a_figure_has_a_line_per_rule_and_a_panel_per_trace(tmp_path, monkeypatch):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    results = [study(make_trace(seed=i), f"number {i}", [1.0, 2.0]) for i in range(4)]
    draw_figure(results, tmp_path / "p.png")
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == [result.name for result in results]
    for panel, result in zip(panels, results, strict=True):
        lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
        assert lines == {rule: [result.find(rule, c).success_rate for c in (1.0, 2.0)] for rule in RULES}


def test_batches_hold_the_rows_they_were_asked_for():
    trace = make_trace(4)
    (batch,) = make_batches(trace, [torch.tensor([5, 2])])
    assert batch.survival.numpy().tolist() == trace.survival[[5, 2]].tolist()
    assert batch.accepted.numpy().tolist() == trace.accepted[[5, 2]].tolist()
    assert batch.num_nodes.tolist() == [4, 4]
