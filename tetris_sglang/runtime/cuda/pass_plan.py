"""One FlashInfer plan per captured shape of a pass, remade for every replay.

A captured verify pass has a fixed number of query rows (SGLang's token tier) and of requests (its slots), while the rows of
each request and the lengths of its keys and values change every step. So it is with the draft's passes, but for the rows. Two
ways to follow them:

- `host`: read the lengths back and let FlashInfer plan. Waits for everything queued on the device, drafting included.
- `device`: rewrite the plan's arrays from the lengths on the device (kernels/attention_plan.py), inside the graph. No wait,
  and no launch from the host.

At capture the device's plan is compared with FlashInfer's own; where they differ, `host` is used and the log says so.
"""

from __future__ import annotations

import logging

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from torch import Tensor

from tetris_sglang.kernels.attention_plan import PlanLayout, max_work_items, plan_prefill
from tetris_sglang.kernels.row_layout import lay_out_rows
from tetris_sglang.kernels.tree_mask import pack_tree_mask

logger = logging.getLogger(__name__)


def make_plan(backend, kv_indices: Tensor, num_requests: int, num_rows: int, **options) -> PassPlan:
    """With the workspace and the geometry of one of SGLang's FlashInfer backends; for the others see `PassPlan`."""
    updater = backend.indices_updater_prefill
    return PassPlan(
        backend.workspace_buffer,
        kv_indices,
        num_requests=num_requests,
        num_rows=num_rows,
        num_qo_heads=updater.num_qo_heads,
        num_kv_heads=updater.num_kv_heads,
        head_dim=updater.head_dim,
        q_dtype=updater.q_data_type,
        kv_dtype=updater.data_type,
        **options,
    )


class PassPlan:
    """A FlashInfer wrapper for `num_rows` query rows of `num_requests` requests, page size 1.

    The plan has a slot more than requests, for rows that nobody has: a batch may fill all requests and not all rows.

    Args:
        workspace: uint8, FlashInfer's float workspace; may be shared between plans.
        kv_indices: [tokens] int32, filled by the caller before `replan`; may be shared between plans.
        num_qo_heads, num_kv_heads, head_dim: of the model on this rank.
        q_dtype, kv_dtype: torch dtypes.
        on_device: plan on the device where that can be shown to equal FlashInfer's plan.
        packed_mask: [bytes] uint8 for the masks of trees, rewritten before every pass; may be shared between plans. None:
            chains, which are causal without a mask.
    """

    def __init__(
        self,
        workspace: Tensor,
        kv_indices: Tensor,
        *,
        num_requests: int,
        num_rows: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        on_device: bool,
        packed_mask: Tensor | None = None,
    ) -> None:
        device = workspace.device
        self.num_slots, self.num_rows = num_requests + 1, num_rows
        self.on_device = on_device
        self._kv_indices = kv_indices
        self._geometry = num_qo_heads, num_kv_heads, head_dim, 1  # page size
        self._dtypes = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
        self._max_items = max_work_items(torch.cuda.get_device_properties(device).multi_processor_count, num_kv_heads)
        self._last_page_len = torch.ones(self.num_slots, dtype=torch.int32, device=device)
        self.qo_indptr = torch.zeros(self.num_slots + 1, dtype=torch.int32, device=device)
        self.kv_indptr = torch.zeros_like(self.qo_indptr)
        self._packed_mask = packed_mask
        self._mask_indptr = torch.zeros_like(self.qo_indptr)
        # With these two FlashInfer reads a mask, whatever plan() is told.
        mask_buffers = {"custom_mask_buf": packed_mask, "mask_indptr_buf": self._mask_indptr}
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            backend="fa2",
            qo_indptr_buf=self.qo_indptr,
            paged_kv_indptr_buf=self.kv_indptr,
            paged_kv_indices_buf=kv_indices,
            paged_kv_last_page_len_buf=self._last_page_len,
            **(mask_buffers if packed_mask is not None else {}),
        )
        self._layout: PlanLayout | None = None

    @property
    def kv_lens(self) -> Tensor:
        """[num_slots] int32, key-value tokens of each slot's request, its verified tokens included."""
        return self.kv_indptr[1:] - self.kv_indptr[:-1]

    def set_lengths(self, verify_lens: Tensor, seq_lens: Tensor) -> None:
        """Lay out the requests; rows that no request has go to the first unused slot.

        Args:
            verify_lens: [batch] int32, sum <= num_rows; batch <= num_requests.
            seq_lens: [batch or more] integers, tokens with key-value cache before these rows.
        Sync: none.
        """
        # The outputs of rows that no request has go nowhere, but must be finite: they pass through cache slot 0 as all padding.
        mask_indptr = None if self._packed_mask is None else self._mask_indptr
        lay_out_rows(verify_lens, seq_lens, self.num_rows, self.qo_indptr, self.kv_indptr, mask_indptr)

    def pack_indices(self, translator, forward_batch, kv_lens_sum: int | None = None) -> None:
        """Fill the KV indices for the lengths last set.

        Args:
            translator: SGLang's KVIndexTranslator. forward_batch: gives the requests' rows.
            kv_lens_sum: at least the sum of the lengths, if the host knows.
        Sync: none.
        """
        translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            # The last slot reads as all padding does.
            req_pool_indices=torch.nn.functional.pad(forward_batch.req_pool_indices, (0, 1)),
            seq_lens=self.kv_lens,
            indptr=self.kv_indptr,
            out=self._kv_indices,
            kind=IdSpaceKind.FULL,
            num_token_blocks=None,
            kv_lens_sum=kv_lens_sum,
        )

    def set_trees(self, parents: Tensor, max_depth: int) -> None:
        """Write the mask of the lengths last set.

        Args:
            parents, max_depth: see `pack_tree_mask`.
        Sync: none.
        """
        pack_tree_mask(parents, max_depth, self.qo_indptr, self.kv_indptr, self._packed_mask, self._mask_indptr)

    def capture(self) -> None:
        """Make the first plan, for lengths that sum to `num_rows`; the graph is captured with it."""
        self.wrapper.plan(
            self.qo_indptr,
            self.kv_indptr,
            self._kv_indices[:0],  # in place already
            self._last_page_len,
            *self._geometry,
            causal=self._packed_mask is None,
            **self._dtypes,
        )
        if self.on_device and (reason := self._why_not_on_device()):
            logger.warning(
                "TETRIS: the verify pass of %d rows is planned on the host, with a wait per step: %s",
                self.num_rows,
                reason,
            )
            self.on_device = False

    def replan(self) -> None:
        """Plan for the lengths last set."""
        if self.on_device:
            self._plan_on_device(self.wrapper._int_workspace_buffer)
        else:
            self._plan_on_host()

    def _plan_on_device(self, workspace: Tensor) -> None:
        num_qo_heads, num_kv_heads, *_ = self._geometry
        plan_prefill(
            workspace,
            self._layout,
            self.qo_indptr,
            self.kv_indptr,
            group_size=num_qo_heads // num_kv_heads,
            max_items=self._max_items,
        )

    def _plan_on_host(self) -> None:
        qo_indptr, kv_indptr = self.qo_indptr.cpu(), self.kv_indptr.cpu()
        kv_lens = kv_indptr.diff()
        fast_prefill_plan(
            self.wrapper,
            self.qo_indptr,
            self.kv_indptr,
            self._kv_indices[:0],  # in place already
            self._last_page_len,
            *self._geometry,
            causal=self._packed_mask is None,
            **self._dtypes,
            qo_indptr_host=qo_indptr,
            kv_indptr_host=kv_indptr,
            kv_lens_host=kv_lens,
            max_q_len=int(qo_indptr.diff().max()),
            max_kv_len=int(kv_lens.max()),
        )

    def _why_not_on_device(self) -> str | None:
        """Compare FlashInfer's plan with the device's; None where every array is the same."""
        try:
            self._layout = layout = PlanLayout.parse(self.wrapper._plan_info)
        except ValueError as error:
            return str(error)
        theirs = self.wrapper._int_workspace_buffer
        ours = torch.zeros_like(theirs)
        self._plan_on_device(ours)
        num_items = int(theirs[layout.block_valid_mask_offset :][: layout.padded_batch_size].sum())
        sizes = {
            "request_indices": 4 * num_items,
            "qo_tile_indices": 4 * num_items,
            "kv_tile_indices": 4 * num_items,
            "o_indptr": 4 * (self.num_slots + 1),
            "kv_chunk_size_ptr": 4,
            "total_num_rows": 4,
            "merge_indptr": 4 * (self.num_rows + 1),
            "block_valid_mask": layout.padded_batch_size,
        }
        for name, size in sizes.items():
            start = getattr(layout, f"{name}_offset")
            if not torch.equal(theirs[start : start + size], ours[start : start + size]):
                return f"FlashInfer's plan has another {name} than the device's"
        return None
