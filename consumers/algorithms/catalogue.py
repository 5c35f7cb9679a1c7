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
        repeat_times: default group size.
        schema: what it trains on, experiences of the log or rows of text.
    """

    policy_loss_fn: str
    advantage_fn: str | None = None
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "none"
    policy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    repeat_times: int = 1
    schema: Literal["experience", "sft"] = "experience"


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
    # DeepSeekMath, arXiv:2402.03300
    "grpo": _group_policy("grpo"),
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
    # RAFT, arXiv:2304.06767: imitate the rollouts that the filters left
    "raft": AlgorithmType(policy_loss_fn="sft"),
    "sft": AlgorithmType(policy_loss_fn="sft", schema="sft"),
}

NOT_YET: tuple[str, ...] = (
    "asymre",
    "cispo",
    "cpt",
    "dpo",
    "gigpo",
    "grpo_verl",
    "gspo",
    "jsd",
    "mix",
    "mix_chord",
    "multi_step_grpo",
    "on_policy_distill",
    "opmd",
    "ppo",
    "rec",
    "sapo",
    "sppo",
    "topr",
)


def algorithm_type(name: str) -> AlgorithmType:
    """The algorithm called `name`.

    Raises:
        ConfigError: unknown name, or one of Trinity's that streamrft does not have.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name in NOT_YET:
        raise ConfigError(
            f"algorithm.algorithm_type: {name!r} of Trinity is not available here. Available: "
            f"{', '.join(sorted(ALGORITHMS))}."
        )
    raise ConfigError(unknown("algorithm.algorithm_type", name, ALGORITHMS))
