"""A better draft from the target's own texts: `tetris-sglang distill`."""
