"""Commands as a reader of the documentation types them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def typed(commands: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in `folder` with this Python's programs; bash ends at the first that fails."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": programs, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
