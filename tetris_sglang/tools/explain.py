"""Draws one selection, so that the idea of TETRIS is seen in ten seconds: `tetris-sglang explain`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from tetris_sglang.selection import select_prefixes, select_uniform, survival_from_probs

# A prompt's end, what a draft model might add, and the probability it might give to a token.
EXAMPLES = (
    ("for i in", " range ( len ( xs ) ) :", 0.95),
    ("The best film", "I have ever seen was about a man", 0.52),
    ("SELECT *", "FROM users WHERE id = ? LIMIT 1", 0.86),
    ("Her name was", "Anna and she lived near the cold sea", 0.40),
    ("2, 4, 8, 16,", "32 , 64 , 128 , 256 ,", 0.90),
    ("Dear Sir or", "Madam , I am writing to you about", 0.78),
    ("To be or", "not to be , that is the question", 0.88),
    ("I dreamt of", "a city made of blue glass that sang", 0.34),
)
# The same as trees: each alternative with its probability and what might follow it.
TREE_EXAMPLES = (
    ("for i in", {"range": (0.86, {"(": (0.99, {"len": (0.62, {}), "10": (0.21, {})})}), "xs": (0.09, {":": (0.9, {})})}),
    (
        "Her name was",
        {
            "Anna": (0.36, {"and": (0.48, {}), ".": (0.31, {})}),
            "Mary": (0.29, {"and": (0.51, {}), ".": (0.27, {})}),
            "not": (0.12, {}),
        },
    ),
    ("To be or", {"not": (0.93, {"to": (0.97, {"be": (0.98, {",": (0.81, {})})})}), "to": (0.04, {})}),
    (
        "I dreamt of",
        {"a": (0.31, {"city": (0.22, {}), "place": (0.14, {})}), "the": (0.24, {"sea": (0.4, {})}), "my": (0.13, {})},
    ),
)  # fmt: skip
MAX_DEPTH = min(len(continuation.split()) for _, continuation, _ in EXAMPLES)


def explain(
    batch_size: int = 5,
    max_draft: int = 6,
    capacity_tokens: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> None:
    """Draw TETRIS's choice for an invented batch beside uniform speculation at the same capacity.

    Args:
        batch_size: running requests, at least 1; beyond 8 the examples repeat with other probabilities.
        max_draft: tokens drafted per request, 1..8.
        capacity_tokens: draft tokens verified per step over the whole batch, >= 1; default: 2 per request.
        seed: of the invented probabilities.
        console: where to draw; default: the terminal.
    Raises:
        ValueError: an argument outside its range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 1 <= max_draft <= MAX_DEPTH:
        raise ValueError(f"max_draft must be 1..{MAX_DEPTH}, the depth of the examples, got {max_draft}")
    if capacity_tokens is None:
        capacity_tokens = 2 * batch_size
    if capacity_tokens < 1:
        raise ValueError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
    examples = [EXAMPLES[request % len(EXAMPLES)] for request in range(batch_size)]
    draw_selection(
        invent_survival(batch_size, max_draft, seed),
        capacity_tokens,
        console,
        prompts=[prompt for prompt, _, _ in examples],
        tokens=[continuation.split()[:max_draft] for _, continuation, _ in examples],
    )


class Node(NamedTuple):
    """One drafted token of a tree."""

    text: str
    survival: float
    parent: int | None
    """Index of the parent among its request's nodes; None: the root."""
    depth: int


def explain_trees(capacity_tokens: int | None = None, seed: int = 0, console: Console | None = None) -> None:
    """Draw TETRIS's choice among the nodes of invented draft trees, beside chains at the same capacity.

    Args: as for `explain`; the batch is the examples.
    Raises:
        ValueError: capacity_tokens below 1.
    """
    if capacity_tokens is None:
        capacity_tokens = 3 * len(TREE_EXAMPLES)
    if capacity_tokens < 1:
        raise ValueError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
    console = console or Console()
    generator = torch.Generator().manual_seed(seed)
    forest = [list_nodes(children, generator) for _, children in TREE_EXAMPLES]
    draft_lens = select_nodes(forest, capacity_tokens)
    check = "*" if console.options.ascii_only else "✓"
    num_nodes = sum(map(len, forest))
    console.print(
        f"{len(forest)} requests drafted trees; {capacity_tokens} of {num_nodes} nodes may be verified.\n",
        highlight=False,
    )
    for (prompt, _), nodes, length in zip(TREE_EXAMPLES, forest, draft_lens, strict=True):
        console.print(draw_tree(prompt, nodes, length, check))
    console.print(
        "\n%: a node's survival, the chance that it and all above it are accepted.\n"
        f"{check}: what TETRIS verifies, the best of the whole batch; never a node without the one above it.\n"
        "The target's own next token decides between siblings, so at most one of them is accepted.\n",
        highlight=False,
    )
    console.print(f"no speculation {len(forest):6.2f} tokens per step", highlight=False)
    chains = [list_best_chain(nodes) for nodes in forest]
    for name, drafts in (("TETRIS, chains", chains), ("TETRIS, trees", forest)):
        lens = select_nodes(drafts, capacity_tokens)
        verified, accepted = sum(lens), expect_accepted([[n.survival for n in d] for d in drafts], lens)
        console.print(
            f"{name:<14} {len(forest) + accepted:6.2f} tokens per step: "
            f"{accepted:.2f} of {verified} verified accepted ({accepted / verified:.0%})",
            style="bold" if drafts is forest else None,
            highlight=False,
        )


def list_nodes(children: dict, generator: torch.Generator) -> list[Node]:
    """A tree's nodes in the order in which selection takes them: by survival, parents before children."""
    nodes: list[Node] = []

    def add(children: dict, parent: int | None, survival: float, depth: int) -> None:
        for text, (prob, grandchildren) in children.items():
            noise = 0.2 * (float(torch.rand((), generator=generator)) - 0.5) * (1 - prob)
            nodes.append(Node(text, survival * (prob + noise), parent, depth))
            add(grandchildren, len(nodes) - 1, nodes[-1].survival, depth + 1)

    add(children, None, 1.0, 1)
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].survival, nodes[i].depth))
    place = {index: rank for rank, index in enumerate(order)}
    return [nodes[i]._replace(parent=place.get(nodes[i].parent)) for i in order]


def list_best_chain(nodes: Sequence[Node]) -> list[Node]:
    """The chain of each level's most likely child."""
    chain, parent = [], None
    while any(node.parent == parent for node in nodes):
        parent = next(i for i, node in enumerate(nodes) if node.parent == parent)
        chain.append(nodes[parent])
    return chain


def select_nodes(drafts: Sequence[Sequence[Node]], capacity_tokens: int) -> list[int]:
    """How many of each request's first nodes are verified: `select_prefixes`, as for chains."""
    survival = torch.zeros(len(drafts), max(map(len, drafts)))
    for request, nodes in enumerate(drafts):
        survival[request, : len(nodes)] = torch.tensor([node.survival for node in nodes])
    return select_prefixes(survival, capacity_tokens).tolist()


def draw_tree(prompt: str, nodes: Sequence[Node], draft_len: int, check: str) -> Tree:
    """A request's tree; its first `draft_len` nodes are chosen."""
    tree = Tree(prompt)
    branches = {None: tree}
    for index, node in sorted(enumerate(nodes), key=lambda item: item[1].depth):
        is_chosen = index < draft_len
        mark = f"{check} " if is_chosen else "  "
        label = Text(f"{mark}{node.text}  {node.survival:.0%}", style="bold green" if is_chosen else "dim")
        branches[index] = branches[node.parent].add(label)
    return tree


def invent_survival(batch_size: int, max_draft: int, seed: int) -> Tensor:
    """Survivals [batch, max_draft] as a draft might give them: sure of code and lists, unsure of prose."""
    sureness = torch.tensor([EXAMPLES[request % len(EXAMPLES)][2] for request in range(batch_size)])
    noise = torch.rand(batch_size, max_draft, generator=torch.Generator().manual_seed(seed))
    return survival_from_probs(sureness[:, None] + 0.3 * (noise - 0.5) * (1 - sureness[:, None]))


def draw_selection(
    survival: Tensor,
    capacity_tokens: int,
    console: Console | None = None,
    *,
    prompts: Sequence[str] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draw a batch of chains, the tokens that TETRIS verifies, and what uniform speculation verifies instead.

    Args:
        survival: [batch, max_draft] as for `select_prefixes`.
        capacity_tokens: draft tokens over the whole batch.
        console: where to draw; default: the terminal. Colour only adds: marks alone carry the picture.
        prompts: [batch] what each chain continues; default: the request's number.
        tokens: [batch][max_draft] the drafted texts; default: the survivals alone.
    """
    console = console or Console()
    batch, max_draft = survival.shape
    prompts = prompts or [f"request {request}" for request in range(batch)]
    tokens = tokens or [[f"token {depth + 1}" for depth in range(max_draft)]] * batch
    check, full, empty = ("*", "#", ".") if console.options.ascii_only else ("✓", "■", "·")
    chosen = select_prefixes(survival, capacity_tokens).tolist()
    uniform = select_uniform(survival, capacity_tokens).tolist()
    chains = survival.tolist()

    console.print(
        f"{batch} requests drafted {max_draft} tokens each; {capacity_tokens} of {batch * max_draft} may be verified.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    for depth in range(max_draft):
        table.add_column("draft 1" if depth == 0 else f"{depth + 1}", no_wrap=True, justify="right")
    for name in ("TETRIS", "uniform"):
        table.add_column(name, no_wrap=True, justify="center")
    rows = zip(prompts, tokens, chains, chosen, uniform, strict=True)
    for prompt, texts, chain, chosen_len, uniform_len in rows:
        cells = [
            draw_token(text, chance, check if depth < chosen_len else "")
            for depth, (text, chance) in enumerate(zip(texts, chain, strict=True))
        ]
        strips = [full * length + empty * (max_draft - length) for length in (chosen_len, uniform_len)]
        table.add_row(Text(prompt), *cells, *strips)
    # Wider than a pipe's 80 columns if need be: a cut or folded mark would tell a lie.
    wide = console.options.update(width=10_000)
    width = max(console.width, table.__rich_measure__(console, wide).maximum)
    segments = Segments(console.render(table, wide.update(width=width)))
    console.print(segments, end="", crop=False, soft_wrap=True)

    console.print(
        "%: a token's survival, the chance that it and all before it are accepted.\n"
        f"{check}: what TETRIS verifies, the best of the whole batch.\n"
        "Uniform speculation verifies the same depth everywhere.\n"
        "After its accepted drafts every request emits one token of the target's own.\n",
        highlight=False,
    )
    console.print(f"no speculation {batch:6.2f} tokens per step", highlight=False)
    for name, lens in (("uniform", uniform), ("TETRIS", chosen)):
        verified, accepted = sum(lens), expect_accepted(chains, lens)
        success = f" ({accepted / verified:.0%})" if verified else ""
        console.print(
            f"{name:<14} {batch + accepted:6.2f} tokens per step: {accepted:.2f} of {verified} verified accepted{success}",
            style="bold" if name == "TETRIS" else None,
            highlight=False,
        )


def expect_accepted(chains: Sequence[Sequence[float]], draft_lens: Sequence[int]) -> float:
    """The expected number of accepted drafts: the sum of the chosen tokens' survivals."""
    return sum(sum(chain[:length]) for chain, length in zip(chains, draft_lens, strict=True))


def draw_token(text: str, survival: float, check: str) -> Text:
    """A token over its survival; with a check, it is chosen, and shaded by survival where there is colour."""
    if not check:
        return Text(f"{text}\n{survival:.0%}", style="dim")
    shade = f"rgb(0,{round(40 + 110 * survival)},60)"
    return Text(f"{text}\n{check} {survival:.0%}", style=f"bold white on {shade}")
