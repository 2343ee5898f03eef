"""What is read back from servers: one definition of every count."""

from tetris_sglang.tools.load import DraftCounts, StepCounts, count_drafts, parse_step_counts


def test_draft_counts_use_one_definition_for_standalone_and_tetris():
    shared = {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}
    standalone = count_drafts([shared | {"spec_num_proposed_drafts": 40}] * 2)
    assert standalone == DraftCounts(verify_steps=20, selected=80, accepted=40)
    tetris = count_drafts([shared | {"spec_num_proposed_drafts": 60, "spec_num_selected_drafts": 25}])
    assert (tetris.accept_length, tetris.success_rate, tetris.verified_per_step) == (3.0, 0.8, 3.5)
    assert count_drafts([{"completion_tokens": 5}]).success_rate is None


def test_step_counts_since_an_earlier_reading_undo_the_running_means():
    before = parse_step_counts({"num_steps": 10, "verified_rows": 100, "draft_ms": 2.0})
    after = parse_step_counts({"num_steps": 40, "verified_rows": 400, "draft_ms": 5.0, "verify_ms": 3.0})
    assert after.since(before) == StepCounts(30, 300, {"draft": (5.0 * 40 - 2.0 * 10) / 30, "verify": 4.0})
    assert after.since(after) == StepCounts()
