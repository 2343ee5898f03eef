"""FlashInfer attention of a captured draft's passes, planned inside their graph: the host needs no lengths."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata

from tetris_sglang.runtime.cuda.attention import TetrisFlashInferBackend
from tetris_sglang.runtime.cuda.pass_plan import PassPlan, make_plan


def plans_on_device(target_backend, backend) -> bool:
    """Whether the draft's passes can do so: where the target's do (--speculative-tetris-verify-plan), over full attention."""
    return (
        isinstance(target_backend, TetrisFlashInferBackend)
        and not target_backend.needs_cpu_seq_lens
        and type(backend) is FlashInferAttnBackend
        and backend.dispatch_reason is None
        and backend.prefill_backend == "fa2"
    )


class DraftAttention:
    """Of one batch size: a plan for the window's pass, and one that the passes over one token per request share.

    SGLang plans each of these from the host's lengths with FlashInfer's decode wrappers; its prefill kernels compute the same.

    Args:
        backend: the draft's, its graph state made. width: of the windows.
    """

    def __init__(self, backend: FlashInferAttnBackend, batch_size: int, width: int) -> None:
        self._backend = backend
        device, kv_indices = backend.workspace_buffer.device, backend.cuda_graph_kv_indices[0]
        self._plans, self._num_rows = [], []
        for rows in (width, 1):
            self._plans.append(make_plan(backend, kv_indices, batch_size, batch_size * rows, on_device=True))
            self._num_rows.append(torch.full((batch_size,), rows, dtype=torch.int32, device=device))

    def capture(self, forward_batch) -> None:
        """Make the first plans, for the lengths in `forward_batch`.

        Raises:
            RuntimeError: they are not what the device would have planned.
        """
        for number in range(len(self._plans)):
            plan = self._lay_out(number, forward_batch)
            plan.capture()
            if not plan.on_device:
                raise RuntimeError(
                    "--speculative-tetris-verify-plan device: FlashInfer plans the draft's passes otherwise than TETRIS on the "
                    "device (the log says how). Give --speculative-tetris-verify-plan host."
                )

    def plan(self, number: int, forward_batch) -> DraftAttention:
        """Plan the pass with this number, the window's first, in the graph that is being captured; the backend to run it."""
        plan = self._lay_out(number, forward_batch)
        plan.replan()
        self._backend.forward_metadata = PrefillMetadata([plan.wrapper], use_ragged=False, extend_no_prefix=False)
        return self

    def _lay_out(self, number: int, forward_batch) -> PassPlan:
        """The pass's plan, with its lengths and KV indices."""
        which = min(number, 1)
        plan, num_rows = self._plans[which], self._num_rows[which]
        # Passes behind the window's add a key each.
        before = forward_batch.seq_lens + (number - 1) if which else forward_batch.seq_lens - num_rows
        plan.set_lengths(num_rows, before)
        plan.pack_indices(self._backend.kv_index_translator, forward_batch)
        return plan

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """As upstream's (layers/attention/base_attn_backend.py), through the prefill kernels whatever the mode is."""
        return self._backend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
