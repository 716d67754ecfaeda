"""The only module that touches private JAX names.

Everything here exists because JAX offers no public spelling for it yet; each entry says what
the public replacement would have to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


def make_primitive(name: str) -> Primitive:
    """A multi-result primitive that can be called eagerly and learns its devices when lowered."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(
        lambda *args, **params: _dispatch.apply_primitive(primitive, *args, **params)
    )
    # Without this the lowering context does not say which devices the program is for, and a
    # second, different GPU would get kernels chosen for the first.
    _dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def unify_varying_axes(args: Sequence[jax.Array]) -> list[jax.Array]:
    """Casts all arguments to vary over the union of their manual mesh axes.

    Inside `shard_map` a value is typed by the mesh axes over which it varies. `jax.numpy`
    functions insert these casts by themselves; a primitive of one's own has to ask for them.
    """
    return list(_core.auto_insert_reshard(*args))


def check_varying_axes(name: str, avals: Sequence[ShapedArray]) -> None:
    """Raises where `unify_varying_axes` was switched off and the axes differ."""
    _core.standard_vma_rule(name, *avals)


def update_aval(like: ShapedArray, shape: tuple[int, ...], dtype: Any) -> Any:
    """An aval of another shape that keeps the manual axes and the mesh of `like`."""
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def plain_aval(aval: Any) -> ShapedArray:
    """The aval without sharding and manual axes, as kernels see it."""
    return ShapedArray(aval.shape, aval.dtype)


def lower_function(ctx: mlir.LoweringRuleContext, function: Any, args: Sequence[Any]) -> Any:
    """Lowers `function(*args)`, a tuple of arrays, in place of a primitive.

    The function is traced on plain avals: what a kernel call computes on one device does not
    depend on the mesh it is part of.
    """
    ctx = ctx.replace(avals_in=[plain_aval(aval) for aval in ctx.avals_in])
    return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


def lowering_devices(ctx: mlir.LoweringRuleContext) -> tuple[Any, ...]:
    """The devices a program is being lowered for; empty when it is exported for an absent one."""
    return tuple(getattr(ctx.module_context.axis_context, "device_assignment", None) or ())


def lowering_for_export(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program being lowered is for `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export
