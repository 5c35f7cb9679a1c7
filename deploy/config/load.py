"""Load a run's YAML file: interpolation, aliases, stages, types, then the rules across keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.errors import ConfigError
from . import checks as config_checks
from . import support as config_support
from .read import read
from .schema import Config, StageConfig

if TYPE_CHECKING:
    import yaml
    from omegaconf.errors import OmegaConfBaseException

_RUN_WIDE = (
    "project group name checkpoint_root_dir ray_namespace continue_from_checkpoint event_log "
    "storage log stages cluster monitor"
).split()
_OF_EVERY_ALGORITHM = ("optimizer", "repeat_times")
_ALIASES = {
    "data.dataset_path": "buffer.explorer_input.taskset.path",
    "explorer.runner_num": "explorer.runner_per_model",
    "algorithm.optimizer.warmup_style": "algorithm.optimizer.lr_scheduler_type",
}


@dataclass(frozen=True)
class Loaded:
    """A file as read: its stages in order and one warning for each key that does nothing."""

    path: Path
    stages: tuple[StageConfig, ...]
    warnings: tuple[str, ...]


def load(path: str | Path) -> Loaded:
    """Read and check a configuration file.

    Raises:
        ConfigError: with the key's path, what was found, what is allowed and what to do.
    """
    path = Path(path)
    raw = _resolved(path)
    if isinstance(raw.get("event_log"), str):
        raw["event_log"] = {"url": raw["event_log"]}
    warnings = _move_aliases(raw)
    stages = _stages(raw)
    for stage in stages:
        where = f"stages[{stage.name}]: " if stage.name else ""
        try:
            config_checks.check(stage.config)
            warnings += config_support.warnings_of(stage)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error
    return Loaded(path.resolve(), stages, tuple(dict.fromkeys(warnings)))


def _resolved(path: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        parsed = OmegaConf.load(path)
        raw = OmegaConf.to_container(parsed, resolve=False)
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: a list found; a mapping of keys to values is allowed.")
        config_checks.check_secrets({str(k): v for k, v in raw.items()})
        resolved = OmegaConf.to_container(parsed, resolve=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. Give a YAML file with --config.") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Give a YAML file with --config."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(_no_yaml(path, error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key}: {_unresolved(error)}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _no_yaml(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    lines = path.read_text("utf-8").splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    hint = ' Inside { } a value with ${ needs quotes: "${...}".' if "${" in line else ""
    return f"{path}: no valid YAML: {' '.join(str(error).split())}.{hint}"


def _unresolved(error: OmegaConfBaseException) -> str:
    """What is wrong with an interpolation, without the names of exceptions."""
    text = str(error).splitlines()[0].rpartition("resolving interpolation: ")[2].strip('"')
    if "Environment variable" in text:
        return f"{text}. Set it, or write a default: ${{oc.env:NAME,default}}."
    return f"{text}. Write ${{section.key}}, or ${{oc.env:NAME,default}} for the environment."


def _move_aliases(raw: dict[str, Any]) -> list[str]:
    """Move other spellings to their key in place; warn of those that Trinity deprecates."""
    warnings = []
    for alias, key in _ALIASES.items():
        section, _, name = alias.rpartition(".")
        holder = _section(raw, section, create=False)
        if holder is None or name not in holder:
            continue
        value = holder.pop(name)
        target, _, last = key.rpartition(".")
        place = _section(raw, target, create=True)
        assert place is not None
        if last in place:
            raise ConfigError(f"{alias}: another name of {key}, which is given too; keep one.")
        place[last] = value
        if section == "data":
            raw.pop("data") if not raw["data"] else None
        else:
            warnings.append(f"{alias}: an old name; write {key}.")
    return warnings


def _section(raw: dict[str, Any], path: str, *, create: bool) -> dict[str, Any] | None:
    for part in path.split("."):
        inner = raw.get(part)
        if inner is None and create:
            inner = raw[part] = {}
        if not isinstance(inner, dict):
            return None
        raw = inner
    return raw


def _stages(raw: dict[str, Any]) -> tuple[StageConfig, ...]:
    listed = raw.pop("stages", None) or []
    config, given = read(Config, raw)
    if not listed:
        return (StageConfig("", config, given),)
    if not isinstance(listed, list):
        raise ConfigError("stages: a list of stages is allowed, each with a stage_name.")
    stages = [_stage(raw, entry, i) for i, entry in enumerate(listed)]
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"stages: stage_name {name!r} is used twice; names must differ.")
    return tuple(stages)


def _stage(raw: dict[str, Any], entry: Any, index: int) -> StageConfig:
    where = f"stages[{index}]"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage_name"), str):
        raise ConfigError(f"{where}.stage_name: missing; every stage needs a name.")
    name = entry["stage_name"]
    if not config_checks.is_id(name):
        raise ConfigError(
            f"{where}.stage_name: {name!r} found; use only letters, digits and . _ : -, and not "
            "dots alone"
        )
    for key in _RUN_WIDE:
        if key in entry:
            raise ConfigError(f"{where}.{key}: belongs to the whole run; move it out of stages.")
    own = {key: value for key, value in entry.items() if key != "stage_name"}
    read(Config, own, where)
    config, given = read(Config, merged(inherited(raw, own), own))
    return StageConfig(name, config, given)


def inherited(raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage takes over from the rest of the file.

    Another algorithm takes no functions meant for the first, but its optimiser and group size; a
    stage that says how long it lasts is not ended by what the file says of the run.
    """
    base = {key: dict(v) if isinstance(v, Mapping) else v for key, v in raw.items()}
    algorithm, buffer, trainer = (own.get(key) or {} for key in ("algorithm", "buffer", "trainer"))
    above = base.get("algorithm")
    kind = algorithm.get("algorithm_type") if isinstance(algorithm, Mapping) else None
    if isinstance(above, dict) and kind not in (None, above.get("algorithm_type")):
        base["algorithm"] = {k: v for k, v in above.items() if k in _OF_EVERY_ALGORITHM}
    if {"total_steps", "total_epochs"} & {*buffer, *trainer}:
        for section in ("buffer", "trainer"):
            if isinstance(base.get(section), dict):
                base[section].pop("total_steps", None)
    return base


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`, section by section; lists and plain values are replaced."""
    out = dict(base)
    for key, value in over.items():
        inner = out.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            out[key] = merged(inner, value)
        else:
            out[key] = value
    return out
