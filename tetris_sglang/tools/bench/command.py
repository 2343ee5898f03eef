"""`tetris-sglang bench`. Imports what it needs when it runs, so `--help` is quick."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tetris_sglang.config import find_settings
from tetris_sglang.tools.bench.arms import DRAFTS, FAMILIES, REFERENCE
from tetris_sglang.tools.bench.settings import (
    ARRIVALS,
    DTYPE,
    FULL,
    QUICK,
    RECOMMEND,
    REQUEST_RATES,
    Settings,
    build_settings,
)
from tetris_sglang.tools.bench.workloads import LENGTHS, MAX_CHARS, WAVES, WORKLOADS, find_workload
from tetris_sglang.tools.fetch import NotFetched
from tetris_sglang.tools.server_process import sigterm_as_interrupt

if TYPE_CHECKING:
    from tetris_sglang.tools.bench.results import Results

RESULTS = Path("bench.json")
_NO_SETTINGS = ("full", "recommend", "out", "resume", "report_only", "draft")


def _quick_and_full(name: str) -> str:
    """What `--help` says of a default."""
    return f"{QUICK[name]}; {FULL[name]} with --full"


def bench(
    full: Annotated[bool, typer.Option("--full/--quick", help="Everything, or what fits in a coffee break.")] = False,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend",
            help="Compare every --draft and n-grams, combs and chains, and SGLang's own, and say what to serve with.",
        ),
    ] = False,
    arms: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(FAMILIES)}; '{REFERENCE}' is always measured.",
            show_default=f"{QUICK['arms']}; all with --full",
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            help="Verified drafts per request, e.g. 1,2,3; none: no such arms.",
            show_default=_quick_and_full("k"),
        ),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            help="Drafts beyond k for TETRIS, uniform, random and full.",
            show_default=_quick_and_full("extra"),
        ),
    ] = None,
    capacity_tokens: Annotated[
        str | None,
        typer.Option(
            help="Also TETRIS with this many verified drafts per step over the whole batch; none: no such arms.",
            show_default=_quick_and_full("capacity_tokens"),
        ),
    ] = None,
    num_steps: Annotated[
        int,
        typer.Option(
            help="Drafts per request in auto (n-grams: twice as many) and with --capacity-tokens; levels of draft trees."
        ),
    ] = 6,
    drafts: Annotated[
        str | None,
        typer.Option(help=f"What drafts, of {', '.join(DRAFTS)}.", show_default=f"{DRAFTS[0]}, or those of --draft"),
    ] = None,
    topk: Annotated[
        str,
        typer.Option(
            help="Of SGLang's own: branches of draft trees, --num-steps deep, of k nodes; 1: chains. N-grams and DFlash have "
            "chains alone."
        ),
    ] = "1",
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(help="More auto arms, each with this --speculative-num-draft-tokens: --num-steps + 1 for chains alone."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(help="More auto arms, each with one other --speculative-tetris setting, e.g. shared-texts=on."),
    ] = None,
    workload: Annotated[
        str, typer.Option(help=f"Prompts, of at most {MAX_CHARS} characters: {', '.join(WORKLOADS)}.")
    ] = WORKLOADS[0],
    dataset: Annotated[
        str, typer.Option(help="Instead of --workload: a file of prompts that sglang.bench_serving reads.")
    ] = "",
    dataset_name: Annotated[str, typer.Option(help="The format of --dataset, e.g. sharegpt or openai.")] = "",
    load_flags: Annotated[str, typer.Option(help="More arguments for sglang.bench_serving, as one argument.")] = "",
    arrivals: Annotated[str, typer.Option(help=f"{' or '.join(ARRIVALS)}: so many at a time, or at random times.")] = ARRIVALS[
        0
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight; the largest is how many a server runs at once.",
            show_default=_quick_and_full("concurrency"),
        ),
    ] = None,
    request_rate: Annotated[str | None, typer.Option(help="Poisson arrivals per second.", show_default=REQUEST_RATES)] = None,
    temperature: Annotated[str | None, typer.Option(help="0 is greedy.", show_default=_quick_and_full("temperature"))] = None,
    output_len: Annotated[
        int, typer.Option(help="Tokens per answer: the mean of those drawn, the most of a --dataset's.")
    ] = 96,
    lengths: Annotated[
        str,
        typer.Option(
            help=f"{LENGTHS[0]}: each prompt has a length of its own, from a third to five thirds of --output-len. A greedy "
            f"answer ends where the model ends it, a sampled one goes on. {LENGTHS[1]}: all have --output-len, past an "
            f"answer's end; a control. It flatters arm '{REFERENCE}': there requests of one length start, prefill and end "
            "together, with speculation they end one by one, and every prefill stops the others."
        ),
    ] = LENGTHS[0],
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts per run, unless --waves says more.", show_default=_quick_and_full("prompts")),
    ] = None,
    waves: Annotated[
        int,
        typer.Option(
            help="Prompts per request in flight, at least. In the last wave the slowest finish almost alone: for steady load "
            "8 or more."
        ),
    ] = WAVES,
    repeats: Annotated[int, typer.Option(help="Rounds per cell.")] = 3,
    model_path: Annotated[str, typer.Option(help="Your own target instead of SmolLM2-135M-Instruct.")] = "",
    draft: Annotated[
        list[str] | None, typer.Option(metavar="DRAFT=PATH", help="The model of one of --drafts; repeatable.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of all models.", show_default=f"{DTYPE}; auto with --model-path"),
    ] = None,
    server_flags: Annotated[str, typer.Option(help="More flags for every server, as one argument.")] = "",
    live_servers: Annotated[
        int,
        typer.Option(
            help="Servers up at once, 4 GiB each with the default models. 1: one after the other, for a GPU that holds "
            "one; then a drift of the machine's speed shows as a difference between arms."
        ),
    ] = 4,
    turn_seconds: Annotated[
        float,
        typer.Option(
            help="Interleave runs more finely: each goes on for so many seconds, then it is frozen, its load generator and its "
            "clock with it, and the next one goes on. For machines whose speed drifts. 0: whole runs, one after the other."
        ),
    ] = 0.0,
    phase_times: Annotated[
        bool | None,
        typer.Option(
            help="Time the phases of TETRIS's steps: some ten clock readings per step.",
            show_default="on, with whole runs",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompt order, lengths and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="JSON; Markdown and pictures go beside it.")] = RESULTS,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the complete rounds of an earlier, interrupted run.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Tables and pictures of --out once more; measure nothing.")
    ] = False,
) -> None:
    """Compare TETRIS with no speculation, SGLang's own speculation and other selection rules on real servers.

    Starts a fresh server per arm and drives it with sglang.bench_serving: SmolLM2-135M-Instruct and its EAGLE-3 head,
    asked what users asked. With --model-path, --draft and --dataset: your models, your prompts.
    """
    options = {name: value for name, value in locals().items() if name not in _NO_SETTINGS}
    options["draft_paths"] = draft or ()
    from tetris_sglang.tools.bench.models import list_drafts
    from tetris_sglang.tools.bench.recommend import print_recommendation
    from tetris_sglang.tools.bench.report import print_tables
    from tetris_sglang.tools.bench.servers import RunFailed

    console = Console()
    try:
        if not _has_matplotlib():
            console.print("no pictures: matplotlib is missing: pip install matplotlib", highlight=False, markup=False)
        if report_only:
            results = json.loads(out.read_text())
            if not results["samples"]:
                raise ValueError(f"{out} holds no run yet")
        else:
            settings = _build(full, recommend, options)
            if variables := find_settings():
                raise ValueError(
                    f"{', '.join(variables)}: settings in the environment would change every TETRIS arm. Unset them"
                )
            results = _compare(settings, out, resume, console)
    except (ValueError, FileNotFoundError, NotFetched, RunFailed) as error:
        console.print("[red]error:[/]", end=" ")
        console.print(str(error), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print(f"interrupted; complete rounds are kept in {out}: go on with --resume")
        raise typer.Exit(130) from None
    print_tables(results, console)
    if recommend:
        print_recommendation(results, list_drafts(results["settings"]), console)
    for path in [out, *write_reports(results, out)]:
        console.print(str(path), highlight=False, soft_wrap=True)


def _build(full: bool, recommend: bool, options: dict[str, Any]) -> Settings:
    if full and recommend:
        raise ValueError("--full and --recommend choose arms each: give one of them")
    if recommend:
        own = [draft.partition("=")[0] for draft in options["draft_paths"]] or [DRAFTS[0]]
        options = options | {
            "drafts": options["drafts"] or ",".join(dict.fromkeys([*own, "ngram"])),
            # Chains; the server's default has runners-up, too.
            "num_draft_tokens": options["num_draft_tokens"] or str(options["num_steps"] + 1),
        }
    return build_settings(preset=RECOMMEND if recommend else FULL if full else QUICK, options=options)


def _compare(settings: Settings, out: Path, resume: bool, console: Console) -> Results:
    from tetris_sglang.tools.bench.arms import group_arms
    from tetris_sglang.tools.bench.measuring import bench_serving_arguments
    from tetris_sglang.tools.bench.models import find_models
    from tetris_sglang.tools.bench.results import ResultsFile
    from tetris_sglang.tools.bench.runner import Bench

    arms = settings.build_arms()
    groups = group_arms(arms, settings.live_servers)
    workload = find_workload(settings)
    file = ResultsFile(out, settings, arms, resume=resume)
    with sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="tetris-bench-") as name:
        folder = Path(name)
        needed = {arm.draft for arm in arms if arm.speculates}
        models = find_models(settings, needed, folder)
        temperature = settings.temperature[0]
        dataset = workload.arguments(1, 0, temperature, folder)
        load = bench_serving_arguments("URL", dataset, settings, settings.loads[0], temperature, 0, Path("FILE"))
        for line in (
            f"load: python -m sglang.bench_serving {shlex.join(load)}",
            *(
                f"{arm.name}: {shlex.join(arm.flags(models.drafts[arm.draft], settings.phase_times))}"
                for arm in arms
                if not models.find_obstacle(arm) and arm.speculates
            ),
        ):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        Bench(settings, file, models, workload, folder).run(groups)
    return file.results


def write_reports(results: Results, json_path: Path) -> list[Path]:
    """Write the Markdown tables and, where matplotlib is, the plot beside the JSON; returns their paths."""
    from tetris_sglang.tools.bench.report import render_markdown

    markdown, picture = json_path.with_suffix(".md"), json_path.with_suffix(".png")
    markdown.write_text(render_markdown(results))
    if not _has_matplotlib():
        return [markdown]
    from tetris_sglang.tools.bench.plots import plot_comparison

    plot_comparison(results, picture)
    return [markdown, picture]


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
