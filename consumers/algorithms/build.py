"""From the configured names to the functions of one algorithm. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..settings import AlgorithmSettings, FunctionSettings
from . import advantages, aggregation, entropy, kl, ppo, sft  # noqa: F401  (fill the registries)
from .advantages import AdvantageFn
from .aggregation import Counts, Weights
from .catalogue import algorithm_type
from .entropy import EntropyBonus
from .kl import KlLoss
from .registry import ADVANTAGES, AGGREGATIONS, ENTROPY_LOSSES, KL_LOSSES, POLICY_LOSSES
from .tokens import PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """The functions of one algorithm; total loss = policy - entropy_coef H + kl_coef KL."""

    advantage: AdvantageFn | None
    policy_loss: PolicyLoss
    kl: KlLoss
    entropy: EntropyBonus
    aggregation: Callable[..., Weights]

    @property
    def can_skip_zero_advantage(self) -> bool:
        """Whether a sequence without advantage changes nothing in the gradient."""
        return (
            self.advantage is not None
            and self.policy_loss.is_zero_without_advantage
            and not self.kl.is_active
            and not self.entropy.is_active
        )

    def token_weights(self, num_trained: Counts, *, horizon: int) -> Weights:
        """Weight of a token by its sequence, over the whole batch. See aggregation.py."""
        return self.aggregation(num_trained, horizon=horizon)


def build_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm with what the settings replace.

    `loss_agg_mode` may stand in the arguments of the policy loss, as in Trinity; the key of its
    own goes first. Arguments given for a function replace the algorithm's, they do not add to them.

    Raises:
        ConfigError: an unknown algorithm, function or argument, or a value that is refused.
    """
    kind = algorithm_type(settings.algorithm_type)
    policy = settings.policy_loss_fn or FunctionSettings(
        kind.policy_loss_fn, kind.policy_loss_fn_args
    )
    policy_args = dict(policy.args)
    inner_mode = policy_args.pop("loss_agg_mode", None)
    mode = settings.loss_agg_mode or inner_mode or kind.loss_agg_mode
    return Algorithm(
        advantage=_advantage(settings.advantage_fn, kind.advantage_fn),
        policy_loss=POLICY_LOSSES.create(policy.name, policy_args),
        kl=_create(KL_LOSSES, settings.kl_loss_fn, kind.kl_loss_fn),
        entropy=_create(ENTROPY_LOSSES, settings.entropy_loss_fn, kind.entropy_loss_fn),
        aggregation=AGGREGATIONS.get(mode),
    )


def _advantage(chosen: FunctionSettings | None, default: str | None) -> AdvantageFn | None:
    if chosen is None and default is None:
        return None
    return _create(ADVANTAGES, chosen, default or "")


def _create(registry: Any, chosen: FunctionSettings | None, default: str) -> Any:
    function = chosen or FunctionSettings(default)
    return registry.create(function.name, function.args)
