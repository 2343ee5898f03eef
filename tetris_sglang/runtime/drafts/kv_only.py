"""Passes of a draft for its keys and values alone, which end where the last layer has written them.

Nobody reads what would follow in a prefill, or where the draft catches up: attention, feed-forward layer, vocabulary. Of a
head's one layer that is most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner import EagerRunner


class _Written(Exception):
    """The last layer's keys and values are in place."""


class KVOnlyBackend:
    """An attention backend that computes all layers but the last.

    Args:
        backend: SGLang's, for the others. kv_pool: the draft's. last_layer: its number.
    """

    def __init__(self, backend, kv_pool: MHATokenToKVPool, last_layer: int) -> None:
        self._backend, self._kv_pool, self._last_layer = backend, kv_pool, last_layer

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def forward(self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache: bool = True, **kwargs):
        """As upstream's (layers/attention/base_attn_backend.py)."""
        if layer.layer_id != self._last_layer:
            return self._backend.forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        if save_kv_cache and k is not None:
            self._kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        raise _Written


class KVOnlyPasses:
    """Of one draft.

    Args:
        runner: the draft's ModelRunner, its pools allocated.
    """

    def __init__(self, runner) -> None:
        self._runner = runner
        self._layers = sorted(module.layer_id for module in runner.model.modules() if isinstance(module, RadixAttention))
        pool = runner.token_to_kv_pool
        # Subclasses keep scales or other layouts, which only the backend knows how to write.
        self._is_plain = bool(self._layers) and type(pool) is MHATokenToKVPool and pool.dtype == runner.dtype

    def prefill(self, forward_batch) -> None:
        """Instead of the runner's `forward`."""
        if not self._can_end_early:
            self._runner.forward(forward_batch)
            return
        if not self.has_attention:  # no plan
            forward_batch.mark_forward_metadata_ready()
        with contextlib.suppress(_Written), forward_context(ForwardContext(attn_backend=self._make_backend())):
            self._runner.forward(forward_batch)

    def write(self, forward_batch, forward: Callable) -> None:
        """Run a pass, which is planned where it `has_attention`.

        Args:
            forward: as `DraftPasses.forward`.
        """
        if not self._is_plain:
            forward(forward_batch, self._runner.attn_backend)
            return
        with contextlib.suppress(_Written):
            forward(forward_batch, self._make_backend())

    @property
    def has_attention(self) -> bool:
        """Whether `write` computes any: not of one layer, whose keys and values are the last."""
        return not self._is_plain or len(self._layers) > 1

    @property
    def _can_end_early(self) -> bool:
        graphs = self._runner.prefill_cuda_graph_runner
        return self._is_plain and (graphs is None or isinstance(graphs, EagerRunner))

    def _make_backend(self) -> KVOnlyBackend:
        return KVOnlyBackend(self._runner.attn_backend, self._runner.token_to_kv_pool, self._layers[-1])
