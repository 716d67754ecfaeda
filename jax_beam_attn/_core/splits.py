"""How many pieces to cut a KV sequence into so that all SMs have work."""

from __future__ import annotations


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def num_splits_heuristic(
    total_mblocks: int,
    num_SMs: int,  # the source systems' name
    num_n_blocks: int,
    num_m_blocks: int,
    size_one_kv_head: int,
    is_causal_or_local: bool = False,
    max_splits: int = 128,
    size_l2: int = 50 * 1024 * 1024,
) -> int:
    """FlashAttention's rule for Hopper, as the source systems use it.

    It takes the smallest number of splits whose last wave of thread blocks is at least 85% as
    full as the best number's would be.

    Args:
        total_mblocks: Thread blocks without splitting: batch * heads * query tiles.
        num_SMs: Streaming multiprocessors of the GPU.
        num_n_blocks: Key tiles of one sequence.
        num_m_blocks: Query tiles of one sequence and head.
        size_one_kv_head: Bytes of K and V of one head of one sequence.
        is_causal_or_local: Whether the mask is causal or a window.
        max_splits: Upper bound of the result.
        size_l2: Bytes of L2; K and V beyond it are split so that re-reads by many query tiles
            stay in cache.

    Returns:
        The number of splits, at least 1.

    Source: FlashAttention-3, `hopper/heuristics.h`.

    Example:
        >>> num_splits_heuristic(8, 132, 64, 1, 4096 * 128 * 4)
        15
    """
    if total_mblocks >= 0.8 * num_SMs:
        if size_one_kv_head > size_l2 and num_m_blocks >= 2 * num_SMs and not is_causal_or_local:
            return min(_ceil_div(size_one_kv_head, size_l2), max_splits)
        return 1
    if num_n_blocks <= 4:
        return 1
    candidates = range(1, min(max_splits, num_SMs, num_n_blocks) + 1)

    def fill(splits: int) -> float:
        """Mean share of SMs that are busy over the waves."""
        waves = total_mblocks * splits / num_SMs
        return waves / _ceil_div(total_mblocks * splits, num_SMs)

    best = max(map(fill, candidates))
    return next(splits for splits in candidates if fill(splits) >= 0.85 * best)
