"""The GPU path: ragged verification on FlashInfer, CUDA graphs, and the hooks that they need in SGLang."""
