"""What drafts change in SGLang."""

from __future__ import annotations

from tetris_sglang.config import is_tetris
from tetris_sglang.runtime.drafts.kind import DFLASH, current_kind


def choose_block_layers(_result, *, config, model_config, spec_algorithm, is_draft_worker, **_) -> None:
    """After `_resolve_eagle_aux_hidden_state`: a DFlash draft says elsewhere than EAGLE3 heads do which layers it reads."""
    if is_draft_worker or not is_tetris(spec_algorithm.name) or current_kind() != DFLASH:
        return
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    draft = parse_dflash_draft_config(draft_hf_config=config.draft_model_config.hf_config)
    num_layers = model_config.hf_text_config.num_hidden_layers
    config.eagle_aux_hidden_state_layer_ids = draft.resolve_target_layer_ids(target_num_layers=num_layers)
