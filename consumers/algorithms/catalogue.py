"""The algorithms by their Trinity names: which functions each is made of, with its defaults.

No torch here, so that a configuration can be checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...schemas.errors import ConfigError
from ...streams.registry import unknown


@dataclass(frozen=True)
class AlgorithmType:
    """One algorithm: names in the registries and what it assumes.

    Args:
        loss_agg_mode: None takes the policy loss's own.
        repeat_times: default group size.
        schema: what it trains on: experiences of the log alone, rows to imitate or plain text of
            a file alone; pairs (dpo) or single verdicts (kto) of either.
    """

    policy_loss_fn: str
    advantage_fn: str | None = None
    kl_loss_fn: str = "none"
    kl_penalty_fn: str = "none"
    entropy_loss_fn: str = "none"
    policy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    loss_agg_mode: str | None = None
    repeat_times: int = 1
    schema: Literal["experience", "sft", "cpt", "dpo", "kto"] = "experience"


def _group_policy(advantage_fn: str, **changes: Any) -> AlgorithmType:
    """What most of Trinity's group algorithms share: PPO clip, k2 to the reference, no critic."""
    shared: dict[str, Any] = {
        "policy_loss_fn": "ppo",
        "kl_loss_fn": "k2",
        "entropy_loss_fn": "default",
        "repeat_times": 2,
    }
    return AlgorithmType(advantage_fn=advantage_fn, **(shared | changes))


ALGORITHMS: dict[str, AlgorithmType] = {
    # PPO, arXiv:1707.06347, against a critic
    "ppo": _group_policy("ppo", repeat_times=1),
    # DeepSeekMath, arXiv:2402.03300
    "grpo": _group_policy("grpo"),
    # the same, as veRL's trainer computes it: here there is one place for both
    "grpo_verl": _group_policy("grpo"),
    # DAPO, arXiv:2503.14476: clip-higher, token-level loss, no KL
    "dapo": _group_policy(
        "grpo",
        kl_loss_fn="none",
        repeat_times=16,
        policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
    ),
    # Dr. GRPO, arXiv:2503.20783: no division by the std nor by the length, no KL
    "dr_grpo": _group_policy("dr_grpo", kl_loss_fn="none", loss_agg_mode="seq-mean-token-sum-norm"),
    # RLOO, arXiv:2402.14740
    "rloo": _group_policy("rloo"),
    # REINFORCE++, arXiv:2501.03262
    "reinforceplusplus": _group_policy("reinforceplusplus"),
    # ReMax, arXiv:2310.10505
    "remax": _group_policy("remax", repeat_times=1),
    # OPMD, arXiv:2505.17826, appendix A
    "opmd": _group_policy("opmd", policy_loss_fn="opmd"),
    # AsymRE, arXiv:2506.20520
    "asymre": AlgorithmType("opmd", "asymre", repeat_times=2),
    # TOPR, arXiv:2503.14286
    "topr": _group_policy("reinforce", policy_loss_fn="topr"),
    # CISPO, arXiv:2506.13585
    "cispo": _group_policy("grpo", policy_loss_fn="cispo"),
    # GSPO, arXiv:2507.18071
    "gspo": _group_policy("grpo", policy_loss_fn="gspo"),
    # SAPO, arXiv:2511.20347
    "sapo": _group_policy("grpo", policy_loss_fn="sapo"),
    # sPPO, arXiv:2108.05828
    "sppo": AlgorithmType("sppo", "opmd", repeat_times=2),
    # REC, arXiv:2509.24203
    "rec": _group_policy("rec", policy_loss_fn="rec"),
    # RAFT, arXiv:2304.06767: imitate the rollouts that the filters left
    "raft": AlgorithmType("sft"),
    # steps of an agent share the advantage of their trajectory
    "multi_step_grpo": _group_policy("step_wise_grpo", repeat_times=8),
    # GiGPO, arXiv:2505.10978
    "gigpo": _group_policy("gigpo", repeat_times=8),
    # MIX, arXiv:2505.17826, and CHORD, arXiv:2508.11408
    "mix": _group_policy("grpo", policy_loss_fn="mix", entropy_loss_fn="mix", repeat_times=8),
    "mix_chord": _group_policy(
        "grpo", policy_loss_fn="mix_chord", entropy_loss_fn="mix", repeat_times=8
    ),
    # GKD, arXiv:2306.13649
    "on_policy_distill": AlgorithmType("ppo", "on_policy_distill", repeat_times=8),
    "jsd": AlgorithmType("ppo", "jsd", repeat_times=8),
    "sft": AlgorithmType("sft", schema="sft"),
    "cpt": AlgorithmType("sft", schema="cpt"),
    # DPO, arXiv:2305.18290
    "dpo": AlgorithmType(
        "dpo", kl_loss_fn="k2", entropy_loss_fn="default", repeat_times=2, schema="dpo"
    ),
    # KTO, arXiv:2402.01306
    "kto": AlgorithmType("kto", kl_loss_fn="k2", entropy_loss_fn="default", schema="kto"),
}

_TEACHER = "a teacher's log-probs (explorer.auxiliary_models)"
# what a function reads that nothing delivers yet; the function itself is whole
SOURCES: dict[str, dict[str, str]] = {
    "advantage_fn": {
        "remax": "the reward of a greedy rollout of each task",
        "gigpo": "states of the environment at each step of a multi-turn workflow",
        "on_policy_distill": _TEACHER,
        "jsd": _TEACHER,
    },
}


def algorithm_type(name: str) -> AlgorithmType:
    """The algorithm called `name`.

    Raises:
        ConfigError: unknown name.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    raise ConfigError(unknown("algorithm.algorithm_type", name, ALGORITHMS))


def has_critic(name: str, advantage_fn: str | None = None) -> bool:
    """Whether a value model is trained beside the policy; `advantage_fn` replaces the own one."""
    return (advantage_fn or algorithm_type(name).advantage_fn) == "ppo"


def reads_experts(name: str, policy_loss_fn: str | None = None) -> bool:
    """Whether rows of an expert stand in the batch; `policy_loss_fn` replaces the own one."""
    return (policy_loss_fn or algorithm_type(name).policy_loss_fn) in ("mix", "mix_chord")


def awaited_source(kind: AlgorithmType, **chosen: str | None) -> str | None:
    """What the functions of an algorithm read that is not delivered yet; None when all is there.

    Args:
        kind: the algorithm.
        chosen: advantage_fn and policy_loss_fn where the file replaces them.
    """
    for family, waiting in SOURCES.items():
        name = chosen.get(family) or getattr(kind, family)
        if name in waiting:
            return waiting[name]
    return None


def check_sources(name: str, **chosen: str | None) -> None:
    """Raise ConfigError where the algorithm cannot be trained, naming what it waits for."""
    kind = algorithm_type(name)
    loss = chosen.get("policy_loss_fn") or kind.policy_loss_fn
    if loss != kind.policy_loss_fn and {loss, kind.policy_loss_fn} & {"dpo", "kto"}:
        raise ConfigError(
            f"algorithm.policy_loss_fn: {loss!r} found with algorithm_type {name!r}; what is "
            "preferred is chosen for algorithm_type dpo and kto, each with the loss of its name."
        )
    source = awaited_source(kind, **chosen)
    if source is None:
        return
    ready = sorted(n for n, k in ALGORITHMS.items() if awaited_source(k) is None)
    replaced = ", ".join(f"{family} {value}" for family, value in chosen.items() if value)
    raise ConfigError(
        f"algorithm.algorithm_type: {name!r}{f' with {replaced}' if replaced else ''} waits for "
        f"{source}, which this version does not deliver. Its functions are here; to train now, "
        f"choose one of {', '.join(ready)}."
    )
