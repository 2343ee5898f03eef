"""`python -m tetris_sglang`: the same as `tetris-sglang`."""

from tetris_sglang.tools.cli import main

main()
