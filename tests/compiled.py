"""What is inside exported programs: the kernels, compiled on a host without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import jax

import jax_beam_attn

# The GPU names of `jax_beam_attn.gpu_target` that stand for the architectures served.
ARCHS = {"a100": "sm_80", "h200": "sm_90a", "b200": "sm_100a", "rtx 5090": "sm_120a"}


def export_for(gpu: str, function, *args, platforms=("cuda",), **kwargs) -> jax.export.Exported:
    """Exports a call with kernels for a GPU; arguments are arrays or their structs."""
    with jax_beam_attn.gpu_target(gpu):
        return jax.export.export(
            jax.jit(function),
            platforms=platforms,
            disabled_checks=jax_beam_attn.export_disabled_checks(),
        )(*args, **kwargs)


def ptx_of(exported: jax.export.Exported) -> list[str]:
    """The PTX of each Triton call, which is in a compressed protocol buffer."""
    return [
        _ptx(escaped)
        for escaped in re.findall(r'opaque = "((?:[^"\\]|\\.)*)"', exported.mlir_module())
    ]


def _ptx(escaped: str) -> str:
    raw = re.sub(
        r"\\([0-9A-Fa-f]{2}|.)",
        lambda m: chr(int(m[1], 16)) if len(m[1]) == 2 else {"n": "\n", "t": "\t"}.get(m[1], m[1]),
        escaped,
    ).encode("latin-1")
    text = zlib.decompress(raw).decode("latin-1")
    # The PTX is one string field among others: printable, and it ends with a brace.
    text = re.match(r"[\t\n -~]*", text[text.index("//") :])[0]
    return text[: text.rindex("}") + 1]


def products_of_registers(ptx: str) -> list[str]:
    """The types of each wgmma whose first operand lies in registers, such as "f32.bf16.bf16"."""
    return re.findall(r"wgmma\.mma_async\S+?k\d+\.(\S+) \{[^}]*\}, \{", ptx)


PTXAS = shutil.which("ptxas")


def assemble(ptx: str, arch: str, folder: Path) -> str:
    """Assembles PTX and returns ptxas' report of registers and spills."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    result = subprocess.run(
        [PTXAS, "-v", f"-arch={arch}", source, "-o", folder / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stderr
