"""`python -m tetris_sglang`: the same as `tetris-sglang`."""

from tetris_sglang.cli import main

main()
