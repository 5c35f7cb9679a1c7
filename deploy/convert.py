"""`streamrft convert`: sharded checkpoints made into Hugging Face folders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..schemas.errors import MissingExtra


def command(args: argparse.Namespace) -> int:
    """Convert everything asked for; 0 only when all of it is there afterwards."""
    try:
        from ..consumers.convert import Request, convert
    except ImportError as error:
        raise MissingExtra(f"{error.name}, which convert needs,", "train") from error
    if "://" in args.checkpoint_dir:
        print(
            f"streamrft convert: {args.checkpoint_dir}: an object store is not read. Copy the step "
            "to a disk (with an adapter base_model/ beside it too), and name that folder.",
            file=sys.stderr,
        )
        return 1
    request = Request(
        path=Path(args.checkpoint_dir),
        base=Path(args.base_model_dir) if args.base_model_dir else None,
        steps=tuple(args.step),
        with_critic=args.critic,
        dtype=args.dtype,
    )
    num_failed = 0
    for outcome in convert(request):
        if outcome.state == "failed":
            num_failed += 1
            print(f"streamrft convert: {outcome.detail}", file=sys.stderr)
        else:
            print(f"{outcome.folder}: {outcome.state} ({outcome.detail})", flush=True)
    return 1 if num_failed else 0
