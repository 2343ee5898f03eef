"""Takes every run of a comparison that is still missing.

Several servers are up at once, all but the measured one frozen, and every repeat visits all of them, in whole runs or in
turns of seconds, so that a change of the machine's speed meets every arm alike. Every repeat has fresh servers: two of one
configuration differ by some percent as long as they live, by where their memory lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from tqdm import tqdm

from tetris_sglang.tools.bench.arms import REFERENCE, Arm, order_arms
from tetris_sglang.tools.bench.measuring import Run, take_turns
from tetris_sglang.tools.bench.models import Models
from tetris_sglang.tools.bench.results import ResultsFile, Sample
from tetris_sglang.tools.bench.servers import (
    LiveServer,
    RunFailed,
    check_memory,
    prepare_server,
    start_servers,
)
from tetris_sglang.tools.bench.settings import Settings
from tetris_sglang.tools.bench.workloads import Load, Workload

Round = tuple[int, float, Load]
"""repeat, temperature and load: one run of every arm of a group."""


def _key(group: int, where: Round) -> tuple:
    """As `round_key` of its samples."""
    repeat, temperature, load = where
    return group, temperature, load, repeat


class Bench:
    """Starts the groups of servers one after the other and takes every round that is still missing."""

    def __init__(self, settings: Settings, file: ResultsFile, models: Models, workload: Workload, folder: Path) -> None:
        self.settings, self.file, self.models = settings, file, models
        self.workload, self.folder = workload, folder

    def run(self, groups: Sequence[Sequence[Arm]]) -> None:
        settings, file = self.settings, self.file
        rounds = list(product(range(settings.repeats), settings.temperature, settings.loads))
        for arm in (arm for group in groups for arm in group):
            if obstacle := self.models.find_obstacle(arm):
                file.mark_unavailable(arm, obstacle)
        plan = self._plan(groups, rounds)
        total = sum(len(group) for group in groups) * len(rounds)
        left = sum(len(group) * len(missing) for _, group, missing in plan)
        # What an earlier run took says nothing about how long the rest will take.
        with tqdm(total=total, initial=total - left, unit="run", smoothing=0.1) as bar:
            for number, group, missing in plan:
                self._run_group(number, group, missing, bar)

    def _plan(self, groups: Sequence[Sequence[Arm]], rounds: Sequence[Round]) -> list[tuple[int, Sequence[Arm], list[Round]]]:
        """(number, arms, missing rounds) of every repeat of a group that lacks any; one by one each arm stands for itself."""
        file = self.file
        if self.settings.one_by_one:
            arms = [arm for arm in groups[0] if not file.is_unavailable(arm)]
            candidates = [(0, [arm], partial(file.has_sample, arm)) for arm in arms]
        else:
            file.drop_incomplete(groups)
            candidates = [(number, group, file.has_round) for number, group in enumerate(groups)]
        plan = [
            (number, group, [where for where in rounds if where[0] == repeat and not has(_key(number, where))])
            for repeat in range(self.settings.repeats)
            for number, group, has in candidates
        ]
        return [(number, group, missing) for number, group, missing in plan if missing]

    def _run_group(self, number: int, group: Sequence[Arm], rounds: Sequence[Round], bar: tqdm) -> None:
        with contextlib.ExitStack() as stack:
            available = [arm for arm in group if not self.file.is_unavailable(arm)]
            bar.set_description(f"group {number + 1}: starting {len(available)} servers")
            servers = self._start(available, stack)
            if group[0].family == REFERENCE and group[0] not in servers:
                raise RunFailed(f"no reference: {self.file.results['unavailable'][group[0].name]}")
            for where in rounds:
                self._take_round(servers, group, number, where, bar)

    def _take_round(self, servers: dict[Arm, LiveServer], group: Sequence[Arm], number: int, where: Round, bar: tqdm) -> None:
        repeat, temperature, load = where
        runs = [
            Run(servers[arm], self.workload, self.settings, load, temperature, repeat)
            for arm in order_arms(group, repeat)
            if arm in servers
        ]
        bar.set_description(f"{load}, repeat {repeat + 1}: {len(runs)} arms")
        for run, outcome in take_turns(runs, self.settings.turn_seconds or None, bar.refresh):
            self._keep(servers, run.server.arm, outcome, f"failed at {load}", number, repeat)
            bar.update()
        bar.update(len(group) - len(runs))

    def _keep(
        self,
        servers: dict[Arm, LiveServer],
        arm: Arm,
        outcome: Sample | RunFailed,
        where: str,
        number: int,
        repeat: int,
    ) -> None:
        if not isinstance(outcome, RunFailed):
            self.file.add({"group": number, "repeat": repeat, **outcome})
            return
        if arm.family == REFERENCE:
            raise outcome
        # Its earlier samples stay: what it did before it failed is true.
        self.file.mark_unavailable(arm, f"{where}: {outcome}")
        servers.pop(arm).process.stop()

    def _start(self, group: Sequence[Arm], stack: contextlib.ExitStack) -> dict[Arm, LiveServer]:
        check_memory(len(group))
        servers = [prepare_server(arm, self.models, self.settings, self.folder) for arm in group]
        for server in servers:
            stack.callback(server.process.stop)
        reasons = start_servers(servers, self.settings)
        for arm, reason in reasons.items():
            self.file.mark_unavailable(arm, reason)
        return {server.arm: server for server in servers if server.arm not in reasons}
