"""TETRIS speculative decoding (arXiv 2502.15197) as a plugin for stock SGLang."""

__version__ = "0.1.0"
