"""Merging attention over parts of a key sequence: the mathematics, in `jnp`.

Attention over a set of keys is (out, lse) with out the softmax-weighted mean of the values and
lse = log(sum(exp(logit))). For disjoint sets i the whole is

    lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) * out_i.

An empty set has out = 0 and lse = -inf and takes no part, whatever else is merged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges partial attention results along the leading axis.

    Args:
        out: f32 [splits, ..., D].
        lse: f32 [splits, ...], natural logarithm; -inf marks an empty part.

    Returns:
        out f32 [..., D] and lse f32 [...]; 0 and -inf where every part is empty.

    Example:
        >>> out, lse = merge_splits(jnp.array([[1.0], [3.0]]), jnp.array([0.0, 0.0]))
        >>> float(out[0]), round(float(lse), 4)
        (2.0, 0.6931)
    """
    peak = jnp.max(lse, axis=0, keepdims=True)
    # With every part empty the peak is -inf, and -inf - -inf would be NaN.
    weight = jnp.exp(lse - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(weight, axis=0)
    empty = total == 0.0
    # An empty part may hold anything, NaN included: it is dropped, not multiplied by zero.
    parts = jnp.where((weight > 0.0)[..., None], weight[..., None] * out, 0.0)
    merged = jnp.sum(parts, axis=0) / jnp.where(empty, 1.0, total)[..., None]
    return merged, jnp.where(empty, -jnp.inf, peak[0] + jnp.log(total))


def apply_sink(out: jax.Array, lse: jax.Array, sink: jax.Array) -> jax.Array:
    """Adds one more logit, `sink`, to the softmax denominator of `out`.

    The denominator exp(lse) becomes exp(lse) + exp(sink), so `out` shrinks by
    1 / (1 + exp(sink - lse)). An empty row stays 0 for every sink.

    Args:
        out: f32 [..., D].
        lse: f32 [...], without the sink.
        sink: f32, broadcastable to `lse`; -inf changes nothing, +inf gives 0.

    Returns:
        f32 [..., D].
    """
    share = jnp.where(jnp.isneginf(lse), 0.0, jax.nn.sigmoid(lse - sink))
    return out * share[..., None]
