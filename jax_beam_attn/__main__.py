"""The command `python -m jax_beam_attn`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_beam_attn.demo import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the subcommands and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jax_beam_attn")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="beam search with a real language model",
        description="Continues a text by beam search with SmolLM2-135M-Instruct.",
    )
    cli.add_arguments(demo)
    commands.add_parser("info", help="versions, devices, and what this machine can run")
    args = parser.parse_args(argv)
    if args.command == "info":
        from jax_beam_attn import info

        info.main()
        return 0
    return cli.run(args)


if __name__ == "__main__":
    sys.exit(main())
