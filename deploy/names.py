"""Whether the functions that a configuration names can be made: asked of their registries.

`python -m streamrft.deploy.names` is the short process in which preflight asks. It imports what
the roles import, plug-ins and torch included, which the command line does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from ..schemas.errors import ConfigError
from .plan import Stage, plan
from .plugins import load_plugins

ERROR = "streamrft found: "


def check_names(stage: Stage, command: str) -> None:
    """Raise ConfigError for the first name or argument that a role of the stage would refuse."""
    if command == "explore":
        assert stage.explorer is not None
        os.environ.update({k: str(v) for k, v in stage.config.explorer.env_vars.items()})
        from ..producers.rollouts import workflow_and_reward

        for taskset in stage.explorer.tasksets:
            try:
                workflow_and_reward(taskset, taskset.workflow, taskset.reward_fn)
            except ConfigError as error:
                raise ConfigError(f"taskset {taskset.name!r}: {error}") from error
    elif command == "join":
        assert stage.streams is not None
        from ..streams.filters import build_filters
        from ..streams.priority import build_priority

        build_filters(stage.streams.filters)
        build_priority(stage.streams.priority)
    else:
        assert stage.trainer is not None
        from ..consumers.algorithms.build import build_algorithm

        build_algorithm(stage.trainer.algorithm)


def main() -> int:
    """Print the first error behind `ERROR`, as JSON; 2 when there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--plugin-dir", action="append", default=[])
    parser.add_argument("--ask", nargs=2, action="append", metavar=("STAGE", "COMMAND"))
    args = parser.parse_args()
    run = plan(args.config, tuple(args.plugin_dir))
    where = ""
    try:
        load_plugins(run.plugin_dirs)
        for name, command in args.ask:
            where = f"stages[{name}]: " if name else ""
            check_names(run.stage(name), command)
    except ConfigError as error:
        print(f"{ERROR}{json.dumps(f'{where}{error}')}")
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
