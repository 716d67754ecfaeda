"""The machinery of every operator: one JAX primitive with a reference and kernels behind it.

An operator is a primitive of its own. Its default lowering is the `jnp` reference, its `cuda`
lowering picks one of the registered kernel implementations when the target GPU is known, and its
`cpu` lowering takes the native handler of the few operators that have one. So the choice is made
once per compiled program, for the platform it is compiled for, and an exported program carries the
right code for each platform.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_beam_attn._core import checks, jax_compat
from jax_beam_attn._core.handler import NATIVE, Handler
from jax_beam_attn._core.target import GpuTarget, given_target, gpu_target, lowering_target

Operands = dict[str, Any]  # arrays or avals by name; an absent optional operand has no entry

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of a call when it is lowered, besides its operands.

    Attributes:
        static: The operator's static arguments.
        plan: The caller's plan, or None.
        target: The GPU the program is for.
        cost: `flops` and `bytes_accessed` of the call, for XLA's cost model and profilers.
    """

    static: Any
    plan: Any
    target: GpuTarget
    cost: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A kernel implementation of an operator.

    Attributes:
        name: `"triton"`, `"cute"` or `"native"`.
        unavailable: Target to the reason why it cannot be used for it in this installation, or
            None.
        unsupported: `(operand avals, call)` to the reason why it cannot serve the call, or None.
        run: `(operands, call)` to the tuple of outputs; traced inside the lowering.
    """

    name: str
    unavailable: Callable[[GpuTarget], str | None]
    unsupported: Callable[[Operands, Call], str | None]
    run: Callable[[Operands, Call], tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Output:
    """Shape, dtype and the value that stands for "nothing to attend to" of one output."""

    shape: tuple[int, ...]
    dtype: Any
    empty: float = 0.0


class Operator:
    """A primitive with its rules.

    Args:
        name: The public function's name.
        reference: `(operands, static)` to the tuple of outputs, in pure `jnp`.
        outputs: `(operand avals, static)` to the outputs' `Output`s.
        fold: `(size, operands, mapped names, static)` to `(operands, static)` for a call whose
            leading batch axis is `size` times as long. Mapped operands come with the mapped axis
            in front; see `jax_beam_attn._core.folding`.
        empty: `(operand avals, static)` to whether no row can have anything to attend to; then
            no kernel is launched.
        cost: `(operand avals, static)` to a dict of `flops` and `bytes_accessed`.
        instead: What to use where gradients are needed, for the error message.
        handler: Native code that serves every call, on CPUs and, where it has that part, GPUs.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[[Operands, Any], tuple[jax.Array, ...]],
        outputs: Callable[[Operands, Any], tuple[Output, ...]],
        fold: Callable[[int, Operands, frozenset[str], Any], tuple[Operands, Any]],
        empty: Callable[[Operands, Any], bool],
        cost: Callable[[Operands, Any], Mapping[str, int]],
        instead: str,
        handler: Handler | None = None,
    ):
        self.name = name
        self.handler = handler
        self.implementations: list[Implementation] = []  # best first
        if handler is not None:
            self.implementations.append(_on_gpu(handler))
        self._reference = reference
        self._outputs = outputs
        self._fold = fold
        self._empty = empty
        self._cost = cost
        self._instead = instead
        self._primitive = jax_compat.make_primitive(name)
        self._primitive.def_abstract_eval(self._abstract_eval)
        mlir.register_lowering(self._primitive, self._lower_reference)
        mlir.register_lowering(self._primitive, self._lower_cpu, platform="cpu")
        mlir.register_lowering(self._primitive, self._lower_cuda, platform="cuda")
        batching.primitive_batchers[self._primitive] = self._batch
        ad.primitive_jvps[self._primitive] = self._refuse_gradient

    def __call__(
        self,
        operands: Mapping[str, jax.Array | None],
        static: Hashable,
        *,
        implementation: str | None = None,
        plan: Hashable = None,
    ) -> list[jax.Array]:
        """Calls the operator.

        Args:
            operands: Arrays by name; None for an absent one.
            static: Hashable static arguments.
            implementation: None for the best, or a name.
            plan: The operator's plan, or None.

        Returns:
            The outputs.
        """
        names = [REFERENCE, *(each.name for each in self.implementations)]
        if implementation is not None:
            checks.one_of("implementation", implementation, names)
        present = {name: array for name, array in operands.items() if array is not None}
        return self._primitive.bind(
            *jax_compat.unify_varying_axes(list(present.values())),
            names=tuple(present),
            static=static,
            implementation=implementation,
            plan=plan,
            given=given_target(),
        )

    def select(
        self, implementation: str | None, operands: Operands, call: Call
    ) -> Implementation | None:
        """The implementation that serves a call; None stands for the reference.

        Raises:
            ValueError: If the implementation asked for cannot serve it, with the reason.
        """
        for each in self.implementations:
            if implementation not in (None, each.name):
                continue
            reason = each.unavailable(call.target) or each.unsupported(operands, call)
            if reason is None:
                return each
            if implementation is not None:
                raise ValueError(self._cannot_serve(each.name, reason))
        return None

    def _cannot_serve(self, implementation: str, reason: str) -> str:
        return f"{self.name}: implementation={implementation!r} cannot serve this call: {reason}"

    def _abstract_eval(self, *avals, names, static, **_):
        sharded = [n for n, a in zip(names, avals, strict=True) if any(a.sharding.spec)]
        if sharded:
            raise ValueError(
                f"{self.name}: {', '.join(sharded)} is explicitly sharded, expected per-device "
                "blocks: call the operator inside jax.shard_map"
            )
        jax_compat.check_varying_axes(self.name, avals)
        outputs = self._outputs(_by_name(names, avals), static)
        return [jax_compat.update_aval(avals[0], each.shape, each.dtype) for each in outputs]

    def _reference_outputs(self, names, static, *args):
        """The reference, or constants where there is nothing to compute."""
        operands = _by_name(names, args)
        outputs = self._outputs(operands, static)
        if self._is_trivial(operands, outputs, static):
            return tuple(jnp.full(each.shape, each.empty, each.dtype) for each in outputs)
        return self._reference(operands, static)

    def _is_trivial(self, operands: Operands, outputs: Sequence[Output], static: Any) -> bool:
        return any(0 in each.shape for each in outputs) or self._empty(operands, static)

    def _is_trivial_call(self, ctx, names, static) -> bool:
        avals = _by_name(names, map(jax_compat.plain_aval, ctx.avals_in))
        return self._is_trivial(avals, self._outputs(avals, static), static)

    def _lower_reference(self, ctx, *args, names, static, implementation, **_):
        if implementation not in (None, REFERENCE):
            platforms = ctx.platforms or ctx.module_context.platforms
            raise ValueError(
                f"{self.name}: implementation={implementation!r} runs on CUDA GPUs only, and the "
                f"program is being compiled for {', '.join(platforms)}"
            )
        run = functools.partial(self._reference_outputs, names, static)
        return jax_compat.lower_function(ctx, run, args)

    def _lower_cpu(self, ctx, *args, names, static, implementation, **params):
        """By the handler, if there is one; but an exported program is to run without it, too."""
        handler = self.handler
        wanted = implementation == NATIVE or (
            implementation is None and not jax_compat.lowering_for_export(ctx)
        )
        if handler is not None and wanted and not self._is_trivial_call(ctx, names, static):
            reason = handler.unavailable("cpu")
            if reason is None:
                return jax_compat.lower_function(
                    ctx, lambda *arrays: handler.run(_by_name(names, arrays), static), args
                )
            if implementation == NATIVE:
                raise ValueError(self._cannot_serve(NATIVE, reason))
        rest = params | {"names": names, "static": static}
        implementation = None if wanted else implementation
        return self._lower_reference(ctx, *args, implementation=implementation, **rest)

    def _lower_cuda(self, ctx, *args, names, static, implementation, plan, given):
        run = functools.partial(self._reference_outputs, names, static)
        trivial = self._is_trivial_call(ctx, names, static)
        if implementation != REFERENCE and not trivial and self.implementations:
            target = given or lowering_target(ctx)
            if target is not None:
                avals = _by_name(names, map(jax_compat.plain_aval, ctx.avals_in))
                call = Call(static, plan, target, self._cost(avals, static))
                chosen = self.select(implementation, avals, call)
                if chosen is not None:

                    def run(*arrays):
                        with gpu_target(target):  # operators that it calls are for the same GPU
                            return tuple(chosen.run(_by_name(names, arrays), call))

            elif implementation is not None:
                raise ValueError(f"{self.name}: implementation={implementation!r} {_NO_TARGET}")
            else:
                warnings.warn(
                    f"{self.name}: the reference is used; a kernel {_NO_TARGET}", stacklevel=2
                )
        return jax_compat.lower_function(ctx, run, args)

    def _batch(self, args, dims, *, names, static, **params):
        mapped = frozenset(name for name, dim in zip(names, dims, strict=True) if dim is not None)
        size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
        operands = {
            name: jnp.moveaxis(arg, dim, 0) if name in mapped else arg
            for name, arg, dim in zip(names, args, dims, strict=True)
        }
        single = {
            name: jax.ShapeDtypeStruct(array.shape[name in mapped :], array.dtype)
            for name, array in operands.items()
        }
        shapes = [(size, *each.shape) for each in self._outputs(single, static)]
        operands, static = self._fold(size, operands, mapped, static)
        outputs = self._primitive.bind(
            *jax_compat.unify_varying_axes(list(operands.values())),
            names=tuple(operands),
            static=static,
            **params,
        )
        unfolded = [out.reshape(shape) for out, shape in zip(outputs, shapes, strict=True)]
        return unfolded, [0] * len(unfolded)

    def _refuse_gradient(self, *_, **__):
        raise NotImplementedError(
            f"{self.name} is forward-only: it is for decoding and has no derivative. "
            f"Where a gradient is needed, use {self._instead}, or wrap the operands in "
            "jax.lax.stop_gradient"
        )


def _by_name(names: Sequence[str], values: Iterable[Any]) -> Operands:
    return dict(zip(names, values, strict=True))


def _on_gpu(handler: Handler) -> Implementation:
    return Implementation(
        NATIVE,
        unavailable=lambda target: handler.unavailable_on_gpu(target.compute_capability),
        unsupported=lambda operands, call: None,
        run=lambda operands, call: handler.run(operands, call.static),
    )


_NO_TARGET = (
    "is compiled for one GPU and there is none here: "
    'trace inside `with jax_beam_attn.gpu_target("h200"):` to name it'
)
