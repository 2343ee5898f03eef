"""SGLang's draft workers, bare: they own the model, its KV pool (slots shared with the target) and its attention backends."""

from __future__ import annotations

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from tetris_sglang.runtime.drafts import dflare, steered
from tetris_sglang.runtime.drafts.kind import DFLASH, EAGLE, EAGLE3, MTP, STANDALONE, STEERED


class _BareWorker:
    """Without what SGLang drafts with."""

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        backend = self.draft_runner.attn_backend
        if hasattr(backend, "use_paged"):
            # FlashInfer would read a pass's own keys from its rows, those that are not real included, instead of the cache.
            backend.use_paged = True

    def _rebuild_topk1_chain_buffers(self) -> None:
        """What SGLang builds its own chains from, and why it wants no more than num_steps + 1 tokens in one."""

    def _capture_cuda_graphs(self) -> None:
        """One graph for all passes of a step (runtime/cuda/draft_graph.py) takes the place of SGLang's two."""
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None


class StandaloneModelWorker(_BareWorker, StandaloneDraftWorker):
    """A language model of its own."""


class HeadWorker(_BareWorker, EagleDraftWorker):
    """EAGLE, EAGLE3 and multi-token prediction: embedding (and output layer) of the target, and its hidden states."""


class SteeredWorker(_BareWorker, EagleDraftWorker):
    """A language model that the target steers. To SGLang an EAGLE3 head: it reads the states of several layers."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        steered.register_model()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)

    def init_lm_head(self) -> None:
        """Embedding and output layer stay its own."""


class BlockWorker(_BareWorker, EagleDraftWorker):
    """DFlash and DFlare. To SGLang EAGLE3 heads: they read the states of several layers."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        dflare.register_model()
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # Where SGLang looks up how many.
        layer_ids = target_worker.model_runner.spec_aux_config.eagle_aux_hidden_state_layer_ids
        config = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layer_ids}
        self.draft_runner.model_config.hf_config.eagle_config = config

    def init_lm_head(self) -> None:
        """Embedding and output layer stay the target's (runtime/drafts/dflash.py)."""


WORKERS = {
    STANDALONE: StandaloneModelWorker,
    STEERED: SteeredWorker,
    **dict.fromkeys((EAGLE, EAGLE3, MTP), HeadWorker),
    DFLASH: BlockWorker,
}
"""By the draft's kind."""
