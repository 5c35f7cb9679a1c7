"""The command line: parse first, import what a command needs after.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 5 a checkpoint could not be saved, 130
and 143 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from importlib import import_module

from .. import __version__
from ..schemas.errors import StreamrftError

USAGE_ERROR = 2
_ROLES = {
    "schedule": "publish tasks, as far ahead of training as the configuration allows",
    "explore": "roll tasks out and publish trajectories",
    "join": "join trajectories with their rewards into experiences",
    "train": "train on experiences and publish checkpoints",
}
# commands of Trinity-RFT that this version does not have, and what does their work here
_ABSENT = {
    "studio": "A configuration is a YAML file; `streamrft run --dry-run` prints all that it means",
    "debug": "`streamrft run --dry-run` prints what would run; `streamrft explain ID` tells a path",
    "view": "`streamrft tail experiences` and `tail trajectories` print what is on the log",
    "log": "Every process writes its own file in <job folder>/log/",
    "perf": "The programs in benchmarks/ measure",
}
_STAGE = {
    "run": "only this stage (default: all, in order)",
    **dict.fromkeys(_ROLES, "the stage; needed where the run has several"),
    "": "a stage of the run (default: the one it is in)",
}
_EPILOG = """\
A run is its configuration file: give every command the same --config.

  streamrft run --config run.yaml            every role here, to the end
  streamrft status --config run.yaml         where every trajectory is
  streamrft tail rewards --config run.yaml   the last events of a topic

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 5 a checkpoint
could not be saved, 130 and 143 interrupted; topics also 3 and 4.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser, known = _parser()
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] not in known and not words[0].startswith("-"):
        print(f"streamrft {_no_command(words[0], known)}", file=sys.stderr)
        return USAGE_ERROR
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        return _handler(args.handler)(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of a pipe left, as `head` does; nothing may be written to it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except StreamrftError as error:
        if args.debug:
            raise
        words = " ".join(filter(None, (args.command, getattr(args, "action", None))))
        with suppress(OSError):  # a full disk below a log must not change what it ends with
            print(f"streamrft {words}: {error}", file=sys.stderr)
        return error.exit_code


def _no_command(word: str, known: Iterable[str]) -> str:
    if word in _ABSENT:
        return f"{word}: not in this version. {_ABSENT[word]}."
    from ..streams.registry import unknown

    return f"{word}: {unknown('command', word, known)}"


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    module, _, function = name.partition(":")
    return getattr(import_module(f".{module}", __package__), function)


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """What reads the words, and the commands that it knows."""
    parser = argparse.ArgumentParser(
        prog="streamrft",
        description="Reinforcement fine-tuning of language models as a stream of events.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamrft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_run(commands)
    for name, what in _ROLES.items():
        role = _add(commands, name, what, "roles:role_command")
        _add_plugins(role)
        role.add_argument(
            "--name", help="process name, unique in the run (default: role, host, process number)"
        )
        if name == "join":
            role.add_argument(
                "--engine",
                choices=("faust", "native"),
                help="the shell (default: streams.engine; faust on Kafka, native otherwise)",
            )
    _add_status(commands)
    explain = _add(
        commands, "explain", "tell the whole path of one id from the log", "views.explain:command"
    )
    explain.add_argument(
        "id", metavar="ID", help="a trajectory, a group, a reward's event_id or global_step_N"
    )
    _add_tail(commands)
    produce = _add(
        commands, "produce", "append JSON lines to a topic", "views.lines:produce_command"
    )
    produce.add_argument("topic", metavar="TOPIC", help="such as rewards")
    produce.add_argument("--file", default="-", help="JSON lines; - (default) is standard input")
    _add_topics(commands)
    _add_dead_letters(commands)
    _add_convert(commands)
    return parser, commands.choices


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    handler: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    parser.set_defaults(handler=handler)
    what = "the run's YAML file"
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help=what)
    parser.add_argument("--stage", metavar="NAME", help=_STAGE.get(name, _STAGE[""]))
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="import every .py file in it, to register workflows, rewards and filters; repeatable",
    )


def _add_run(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    run = _add(commands, "run", "start every role here and train to the end", "run:run_command")
    _add_plugins(run)
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, every value, and start nothing",
    )
    run.add_argument("--plain", action="store_true", help="one line a step, no live display")
    run.add_argument("--dlc", action="store_true", help=argparse.SUPPRESS)


def _add_status(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    what = "count every trajectory by its final state; exit 1 when the ledger does not balance"
    status = _add(commands, "status", what, "views.status:command")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.add_argument("--full", action="store_true", help="count anew from the first record")


def _add_tail(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    tail = _add(commands, "tail", "print the events of a topic", "views.lines:tail_command")
    tail.add_argument("topic", metavar="TOPIC", help="such as trajectories or drops")
    tail.add_argument("--json", action="store_true", help="whole events as JSON lines")
    tail.add_argument(
        "--from",
        dest="start",
        type=_count,
        metavar="OFFSET",
        help="first offset of every partition",
    )
    tail.add_argument("-n", type=_count, metavar="N", help="last N events (default 10)")
    tail.add_argument("-f", "--follow", action="store_true", help="go on as events come")


def _add_topics(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "compare a run's topics with the log, create and alter them"
    topics = _add_family(commands, "topics", what, "plan|apply|describe")
    what = "show what apply would change: exit 0 nothing, 3 changes, 4 some are refused"
    planned = _add(topics, "plan", what, "views.topics:plan_command")
    what = "show the same and do it: exit 0 done, 4 refused and nothing done"
    applied = _add(topics, "apply", what, "views.topics:apply_command")
    for parser in (planned, applied):
        parser.add_argument(
            "--allow-data-loss", action="store_true", help="changes that delete records"
        )
        parser.add_argument(
            "--allow-moving-keys", action="store_true", help="more partitions of a topic in use"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    what = "print every topic's partitions, settings, offsets and size"
    described = _add(topics, "describe", what, "views.topics:describe_command")
    described.add_argument("--json", action="store_true", help="one JSON object a topic")


def _add_dead_letters(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "records that no reader could take: see them, send them again"
    family = _add_family(commands, "dead-letters", what, "list|show|replay")
    what = "print where each lies, why it was refused and how it begins"
    _add_choice(_add(family, "list", what, "views.dead_letters:list_command"))
    what = "print one with all its bytes and the fields that can be read"
    show = _add(family, "show", what, "views.dead_letters:show_command")
    show.add_argument("id", metavar="ID", type=_count, help="as list prints it")
    show.add_argument("--raw", action="store_true", help="the value's bytes alone, as they are")
    what = "send the raw records again to their topics; exit 1 when one could not be"
    replay = _add(family, "replay", what, "views.dead_letters:replay_command")
    replay.add_argument("ids", metavar="ID", type=_count, nargs="*", help="as list prints it")
    replay.add_argument("--all", action="store_true", help="all that were not replayed yet")
    replay.add_argument("--again", action="store_true", help="also those replayed before")
    _add_choice(replay)


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "make Hugging Face folders of sharded checkpoints; exit 0 only when all are there"
    parser = commands.add_parser("convert", help=what, description=what[0].upper() + what[1:] + ".")
    parser.set_defaults(handler="convert:command")
    where = "a job's folder, a global_step_N, or any path inside one"
    parser.add_argument("-c", "--checkpoint-dir", required=True, metavar="PATH", help=where)
    what = "a Hugging Face folder for the config and tokenizer that a checkpoint lacks"
    parser.add_argument("-b", "--base-model-dir", metavar="DIR", help=what)
    steps = "only these steps (default: every one under PATH); repeatable"
    parser.add_argument(
        "-s", "--step", type=_count, nargs="+", action="extend", default=[], help=steps
    )
    parser.add_argument("--critic", action="store_true", help="convert the critics too")
    what = "of the written weights (default: that of the shards)"
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help=what)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", help="only of this topic, such as rewards")
    parser.add_argument("--reader", help="only what this process refused, such as join-0")
    parser.add_argument("--since", metavar="DURATION", help="only of the last 2h, 30m, 3d")
    parser.add_argument("--error", metavar="TEXT", help="only where the reason says this")
    parser.add_argument("--json", action="store_true", help="JSON lines")


def _add_family(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    actions: str,
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """A command with commands of its own."""
    parser = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    return parser.add_subparsers(dest="action", metavar=actions, required=True)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} found; a whole number from 0 is allowed")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
