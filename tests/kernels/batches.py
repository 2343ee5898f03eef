"""Where the kernels' tests run, and the batches they run on.

The kernels run on a CUDA device, or without one in Triton's interpreter. Triton decides between the two when
it is imported, and other tests import it too: so the interpreted run is a process of its own, started by
test_interpreter.py.
"""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device: test_interpreter.py runs this in a process with TRITON_INTERPRET=1",
        allow_module_level=True,
    )
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device: the interpreter has no graphs or streams")


class Batch(NamedTuple):
    """A decode batch on the CPU; `draft_lens` is any ragged selection."""

    candidates: Tensor
    seq_lens: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    draft_lens: Tensor

    @classmethod
    def random(cls, batch: int, width: int, seed: int, vocab: int = 3, dtype=torch.int64) -> "Batch":
        """Few distinct tokens, so that drafts are often accepted; every KV slot differs from every other."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        pool, context = batch + 3, 2 * width + 5
        slots = 1 + torch.randperm(pool * context, generator=generator)
        return cls(
            candidates=draw(0, vocab, (batch, width)),
            seq_lens=draw(1, context - width + 1, (batch,)).to(dtype),
            req_to_token=slots.view(pool, context).to(torch.int32),
            req_pool_indices=torch.randperm(pool, generator=generator)[:batch].to(dtype),
            draft_lens=draw(0, width, (batch,)).to(torch.int32),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.draft_lens.sum()) + len(self.draft_lens)


class Trees(NamedTuple):
    """Random trees in the numbering of `drafting.proposal`; siblings' tokens differ."""

    candidates: Tensor
    parents: Tensor
    depths: Tensor

    @classmethod
    def random(cls, batch: int, width: int, seed: int) -> "Trees":
        generator = torch.Generator().manual_seed(seed)
        parents, depths = torch.zeros(2, batch, width, dtype=torch.int64)
        candidates = torch.zeros_like(parents)
        for request in range(batch):
            num_children = [0] * width
            for node in range(1, width):
                # Often the node before: long paths, too.
                parent = int(torch.randint(node, (), generator=generator))
                if torch.rand((), generator=generator) < 0.5:
                    parent = node - 1
                parents[request, node], depths[request, node] = parent, depths[request, parent] + 1
                candidates[request, node] = num_children[parent]
                num_children[parent] += 1
        return cls(candidates, parents, depths)

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_equal(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    """Field by field: values, shapes and dtypes."""
    for name, ours, theirs in zip(expected._fields, actual, expected, strict=True):
        if theirs is None:
            assert ours is None, name
            continue
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
