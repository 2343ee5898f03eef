"""How many slots a request's row in SGLang's request-to-token table has room for."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_spec

from tetris_sglang.config import is_tetris


def add_headroom(original) -> int:
    """AROUND hook of get_req_to_token_extra_context_len: slots beyond the model's context length.

    Each step reserves twice the slots that a request may verify, also close to the end of the context. Upstream leaves
    room for one time that many and four, so that from nine columns on the last steps before the end write into the
    next request's row (patches/README.md).
    """
    extra = original()
    if not is_tetris(get_spec().speculative_algorithm):
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
