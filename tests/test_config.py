"""Settings: every form in which they are given, and every value that is refused."""

import dataclasses
import re
from pathlib import Path

import pytest

from tetris_sglang.config import (
    DEFAULT_NUM_STEPS,
    MAX_NUM_STEPS,
    SETTINGS,
    TetrisConfig,
    export_arguments,
)

PER_REQUEST, TOKENS = "SGLANG_TETRIS_CAPACITY_PER_REQUEST", "SGLANG_TETRIS_CAPACITY_TOKENS"
SELECTION, PHASE_TIMES = "SGLANG_TETRIS_SELECTION", "SGLANG_TETRIS_PHASE_TIMES"
RECORD, ACCEPTANCE = "SGLANG_TETRIS_RECORD", "SGLANG_TETRIS_ACCEPTANCE"


def parse(num_steps: int = DEFAULT_NUM_STEPS, **variables: str) -> TetrisConfig:
    return TetrisConfig.from_environment(num_steps, variables)


@pytest.mark.parametrize(
    "variables, field, expected",
    [
        ({PER_REQUEST: "2.5"}, "capacity_per_request", 2.5),
        ({PER_REQUEST: "3"}, "capacity_per_request", 3.0),
        ({PER_REQUEST: "1e-3"}, "capacity_per_request", 0.001),
        ({TOKENS: "1"}, "capacity_tokens", 1),
        ({TOKENS: "4096"}, "capacity_tokens", 4096),
        ({SELECTION: "tetris"}, "selection", "tetris"),
        ({SELECTION: "uniform"}, "selection", "uniform"),
        ({SELECTION: "random"}, "selection", "random"),
        ({ACCEPTANCE: "block"}, "acceptance", "block"),
        ({PHASE_TIMES: "1"}, "phase_times", True),
        ({PHASE_TIMES: "True"}, "phase_times", True),
        ({PHASE_TIMES: "no"}, "phase_times", False),
    ],
)
def test_good_values(variables, field, expected):
    value = getattr(parse(**variables), field)
    assert value == expected and type(value) is type(expected)


def test_a_file_to_record_to(tmp_path):
    """New, or to be replaced."""
    path = tmp_path / "run.trace"
    assert parse(**{RECORD: str(path)}).record == path
    path.touch()
    assert parse(**{RECORD: str(path)}).record == path
    assert parse(**{RECORD: "run.trace"}).record == Path("run.trace")
    environment = {}
    export_arguments({"speculative_tetris_record": path}, environment)
    assert TetrisConfig.from_environment(4, environment).record == path


def test_a_file_is_no_folder_to_record_in(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must name a file that can be written"):
        parse(**{RECORD: str(tmp_path / "file" / "run.trace")})


@pytest.mark.parametrize("num_steps", [1, 6, 64])
def test_by_default_the_capacity_sets_itself(num_steps):
    assert parse(num_steps) == TetrisConfig(num_steps, None, None, "tetris", calibration=True)
    assert parse(num_steps, **{PER_REQUEST: "auto"}) == parse(num_steps)
    assert parse(num_steps, **{PER_REQUEST: "AUTO", TOKENS: "8"}).capacity_tokens == 8


def test_the_two_forms_of_capacity_exclude_each_other():
    assert parse(**{TOKENS: "8"}).capacity_per_request is None
    assert parse(**{PER_REQUEST: "2"}).capacity_tokens is None


def test_an_empty_variable_counts_as_absent():
    assert parse(**{TOKENS: "", PER_REQUEST: "2"}) == parse(**{PER_REQUEST: "2"})


def test_foreign_and_cache_variables_are_ignored():
    assert parse(SGLANG_PLUGINS="tetris", SGLANG_TETRIS_CACHE="/somewhere", HOME="/root") == parse()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().capacity_tokens = 3


BAD_VALUES = [
    (variable, text, rule)
    for variable, rule, texts in (
        (PER_REQUEST, "finite number above 0", ("0", "0.0", "-1", "-0.5", "nan", "inf", "-inf", "1e400")),
        (PER_REQUEST, "must be auto or a finite number above 0", ("many", "2,5", "two", " ")),
        (TOKENS, "whole number above 0", ("0", "-8")),
        (TOKENS, "must be a whole number", ("2.5", "nan", "inf", "1e3", "many", " ")),
        (SELECTION, "one of tetris, uniform, random", ("best", "TETRIS", "0")),
        (PHASE_TIMES, "one of on, true, yes, 1, off, false, no, 0", ("2", "enable", "maybe")),
        (RECORD, "must name a file that can be written", ("/no/such/folder/run.trace", "/", ".")),
        (RECORD, "must not end in .gz", ("run.trace.gz",)),
    )
    for text in texts
]


@pytest.mark.parametrize("variable, text, rule", BAD_VALUES)
def test_bad_values_name_flag_variable_value_and_rule(variable, text, rule):
    setting = next(setting for setting in SETTINGS if setting.variable == variable)
    with pytest.raises(ValueError) as error:
        parse(**{variable: text})
    for part in (setting.flag, variable, repr(text), rule, setting.help):
        assert part in str(error.value)


@pytest.mark.parametrize("num_steps", [0, -1, MAX_NUM_STEPS + 1, 1000])
def test_number_of_steps_out_of_range(num_steps):
    with pytest.raises(ValueError, match=rf"--speculative-num-steps={num_steps}: .* between 1 and {MAX_NUM_STEPS}"):
        parse(num_steps)


@pytest.mark.parametrize("num_steps", [1, MAX_NUM_STEPS])
def test_number_of_steps_at_the_ends_of_the_range(num_steps):
    assert parse(num_steps).num_steps == num_steps


def test_both_forms_of_capacity():
    with pytest.raises(ValueError) as error:
        parse(**{PER_REQUEST: "2.5", TOKENS: "8"})
    for part in (
        "--speculative-tetris-capacity-per-request=2.5",
        "--speculative-tetris-capacity-tokens=8",
        "Remove one",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "variable, suggestion",
    [
        ("SGLANG_TETRIS_CAPACITY_TOKEN", TOKENS),
        ("SGLANG_TETRIS_CAPACITY_PER_REQ", PER_REQUEST),
        ("SGLANG_TETRIS_SELECT", SELECTION),
    ],
)
def test_unknown_variable_suggests_the_closest(variable, suggestion):
    with pytest.raises(ValueError, match=f"{variable}='3': no such TETRIS variable. Did you mean {suggestion}?"):
        parse(**{variable: "3"})


def test_unknown_variable_lists_all():
    with pytest.raises(ValueError) as error:
        parse(SGLANG_TETRIS_XYZZY="3")
    for setting in SETTINGS:
        assert setting.variable in str(error.value)


def test_names_of_one_setting():
    setting = SETTINGS[0]
    assert setting.flag == "--speculative-tetris-capacity-per-request"
    assert setting.argument == "speculative_tetris_capacity_per_request"
    assert setting.variable == PER_REQUEST


def test_every_setting_is_a_field():
    fields = {field.name for field in dataclasses.fields(TetrisConfig)}
    assert fields == {"num_steps"} | {setting.field for setting in SETTINGS}


# -- Engine arguments ---------------------------------------------------------------------------------------------


def test_engine_arguments_are_moved_into_the_environment():
    environment = {}
    arguments = {
        "model_path": "m",
        "speculative_num_steps": 4,
        "speculative_tetris_capacity_per_request": 2.5,
        "speculative_tetris_phase_times": True,
        "speculative_tetris_selection": None,
    }
    export_arguments(arguments, environment)
    assert arguments == {"model_path": "m", "speculative_num_steps": 4}
    assert TetrisConfig.from_environment(4, environment) == TetrisConfig(4, 2.5, None, "tetris", phase_times=True)


def test_engine_argument_wins_over_the_variable():
    environment = {TOKENS: "4"}
    export_arguments({"speculative_tetris_capacity_tokens": 9}, environment)
    assert TetrisConfig.from_environment(4, environment).capacity_tokens == 9


def test_one_engines_arguments_do_not_reach_the_next_one():
    environment = {TOKENS: "4", "SGLANG_TETRIS_DRAFT": "ngram"}
    export_arguments({"speculative_tetris_phase_times": True, "speculative_tetris_selection": "random"}, environment)
    export_arguments({"speculative_tetris_selection": "uniform"}, environment)
    assert environment == {
        TOKENS: "4",
        "SGLANG_TETRIS_DRAFT": "ngram",
        "SGLANG_TETRIS_SELECTION": "uniform",
    }


@pytest.mark.parametrize("value", [0, -3, 2.5, float("nan"), "many", True])
def test_bad_engine_argument(value):
    with pytest.raises(ValueError, match="speculative_tetris_capacity_tokens=.*must be a whole number"):
        export_arguments({"speculative_tetris_capacity_tokens": value}, {})


def test_unknown_engine_argument():
    arguments, environment = {"speculative_tetris_capacity": 3}, {}
    with pytest.raises(ValueError, match="speculative_tetris_capacity=3: no such TETRIS argument. Did you mean"):
        export_arguments(arguments, environment)
    assert not environment


def test_the_docs_have_every_setting_and_no_other():
    page = (Path(__file__).resolve().parents[1] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| `(--speculative-tetris-[\w-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(setting.flag for setting in SETTINGS)
