"""`streamrft run`: show what would run, or run every stage here to its end."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from ..schemas.errors import ConfigError
from .config.checks import is_secret_name
from .config.training import groups_a_step
from .plan import Run, Stage, plan


def run_command(args: argparse.Namespace) -> int:
    """Run the configuration to its goal; 0 only when it is reached."""
    if args.dlc:
        raise ConfigError(
            "--dlc: it would start a Ray cluster on Alibaba's DLC, and there is no Ray here. Start "
            "streamrft train, schedule, join and explore on the machines that you have."
        )
    run = plan(args.config, tuple(args.plugin_dir))
    if args.dry_run:
        for warning in run.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(resolved_text(run), end="")
        return 0
    from .preflight import check_extras, check_functions
    from .supervisor import supervise
    from .views.display import screen_for

    wanted = [run.stage(args.stage)] if args.stage is not None else run.stages
    roles = [(stage, command) for stage in wanted for command in stage.commands]
    for stage, command in roles:
        check_extras(stage, command)
    check_functions(run, roles)
    with screen_for(sys.stdout, plain=args.plain) as screen:
        return supervise(run, screen, only_stage=args.stage)


def resolved_text(run: Run) -> str:
    """Every value of every stage and what follows from them, as YAML; secrets are masked."""
    from omegaconf import OmegaConf

    shown: dict[str, Any] = {"job_dir": str(run.job_dir), "event_log": _masked(run.log_url)}
    stages = [_stage_facts(stage) for stage in run.stages]
    if len(stages) == 1:
        shown |= stages[0]
    else:
        shown["stages"] = stages
    return OmegaConf.to_yaml(OmegaConf.create({"derived": shown, "configuration": _values(run)}))


def _stage_facts(stage: Stage) -> dict[str, Any]:
    facts: dict[str, Any] = {"stage": stage.name} if stage.name else {}
    facts["processes"] = [spec.name for spec in stage.processes()]
    topics = stage.topics
    from ..schemas.topics import CATALOGUE

    facts["topics"] = {topics.name(name): topics.partitions(name) for name in CATALOGUE}
    if stage.scheduler:
        scheduler, group = stage.scheduler, stage.scheduler.group_size
        facts |= {
            "allowed_staleness": scheduler.pacing.allowed_staleness,
            "groups_a_step": groups_a_step(stage.config),
            "group_size": group,
            "experiences_a_step": scheduler.batch_size * group,
        }
    if stage.streams:
        facts["join"] = stage.streams.engine
    if stage.explorer:
        facts |= {
            "engine": stage.explorer.engine_type,
            "max_prompt_tokens": stage.explorer.max_prompt_tokens,
            "max_response_tokens": stage.explorer.max_response_tokens,
        }
    if stage.trainer:
        after = stage.after.name if stage.after and stage.after.trainer else ""
        facts |= {
            "model": f"last checkpoint of stage {after}" if after else stage.trainer.model_path,
            "checkpoints": stage.trainer.checkpoint_uri,
            "total_steps": stage.trainer.total_steps,
        }
    return facts


def _values(run: Run) -> Any:
    stages = {stage.name: _plain(asdict(stage.config)) for stage in run.stages}
    return stages.get("", stages)


def _plain(value: Any, key: str = "") -> Any:
    """Only what YAML has: tuples become lists, mappings dictionaries, secrets a mask."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(k): _plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, key) for v in value]
    if isinstance(value, str):
        hidden = is_secret_name(key) and value not in ("", "EMPTY")
        return "********" if hidden else _masked(value)
    return value


def _masked(text: str) -> str:
    """A URL without the password in it."""
    from urllib.parse import urlsplit

    password = urlsplit(text).password if "://" in text else None
    return text.replace(f":{password}@", ":********@") if password else text
