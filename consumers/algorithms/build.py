"""From the configured names to the functions of one algorithm. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import ConfigError
from ..settings import AlgorithmSettings, FunctionSettings
from . import advantages, aggregation, entropy, kl, losses  # noqa: F401  (fill the registries)
from .advantages import AdvantageFn
from .aggregation import Counts, Weights
from .catalogue import AlgorithmType, algorithm_type
from .correction import RolloutCorrection
from .entropy import EntropyBonus
from .kl import KlLoss
from .losses.reinforce import ReinforceLoss
from .registry import ADVANTAGES, AGGREGATIONS, ENTROPY_LOSSES, KL_LOSSES, POLICY_LOSSES
from .tokens import PolicyLoss

DEFAULT_MODE = "token-mean"


@dataclass(frozen=True)
class Algorithm:
    """The functions of one algorithm; total loss = policy - entropy_coef H + kl_coef KL.

    `recomputes_old` takes the policy before the step for the old one; `correction` then weighs
    what the behaviour policy wrote.
    """

    advantage: AdvantageFn | None
    policy_loss: PolicyLoss
    kl: KlLoss
    entropy: EntropyBonus
    aggregation: Callable[..., Weights]
    kl_penalty: KlLoss
    recomputes_old: bool = False
    correction: RolloutCorrection | None = None

    @property
    def can_skip_zero_advantage(self) -> bool:
        """Whether a sequence without advantage changes nothing in the gradient."""
        return (
            self.advantage is not None
            and self.policy_loss.is_zero_without_advantage
            and not self.kl.is_active
            and not self.entropy.is_active
        )

    @property
    def reads_reference(self) -> bool:
        """Whether the reference model's log-probs are part of the loss."""
        return self.kl.is_active or getattr(self.policy_loss, "needs_reference", False)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must be there."""
        return self.reads_reference or self.kl_penalty.is_active

    @property
    def measures(self) -> frozenset[str]:
        """Fields of TrainingSequence that a pass without gradient fills in before the step."""
        found = frozenset(getattr(self.advantage, "measures", ()))
        if self.recomputes_old or self.correction is not None:
            found |= {"current_logprobs"}
        return found | {"ref_logprobs"} if self.kl_penalty.is_active else found

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
    policy_loss, inner_mode = _policy_loss(settings, kind)
    correction, recomputes_old = _correction(settings)
    if correction is not None and correction.is_reinforce:
        policy_loss = ReinforceLoss()
    return Algorithm(
        advantage=_advantage(settings.advantage_fn, kind.advantage_fn),
        policy_loss=policy_loss,
        kl=_create(KL_LOSSES, settings.kl_loss_fn, kind.kl_loss_fn),
        entropy=_create(ENTROPY_LOSSES, settings.entropy_loss_fn, kind.entropy_loss_fn),
        aggregation=AGGREGATIONS.get(
            _mode(policy_loss, settings.loss_agg_mode or inner_mode or kind.loss_agg_mode)
        ),
        kl_penalty=_create(KL_LOSSES, settings.kl_penalty_fn, kind.kl_penalty_fn),
        recomputes_old=recomputes_old,
        correction=correction,
    )


def _policy_loss(settings: AlgorithmSettings, kind: AlgorithmType) -> tuple[PolicyLoss, str | None]:
    """The policy loss, and the loss_agg_mode among its arguments."""
    policy = settings.policy_loss_fn or FunctionSettings(
        kind.policy_loss_fn, kind.policy_loss_fn_args
    )
    args = dict(policy.args)
    inner_mode = args.pop("loss_agg_mode", None)
    return POLICY_LOSSES.create(policy.name, args), inner_mode


def _mode(policy_loss: PolicyLoss, asked: str | None) -> str:
    own = getattr(policy_loss, "loss_agg_mode", DEFAULT_MODE)
    if asked and asked != own and getattr(policy_loss, "is_sequence_level", False):
        raise ConfigError(
            f"algorithm.loss_agg_mode: {asked!r} found; the loss is one of whole sequences, so "
            f"only {own!r} gives its mean. Remove the key."
        )
    return asked or own


def _correction(settings: AlgorithmSettings) -> tuple[RolloutCorrection | None, bool]:
    """The correction, and whether old log-probs are recomputed."""
    given: Mapping[str, Any] | None = settings.rollout_correction
    if given is None:
        return None, not settings.bypass_old_logprobs
    args = {"bypass_mode": settings.bypass_old_logprobs, **given}
    correction = RolloutCorrection.create(args)
    return correction, not correction.bypass_mode


def _advantage(chosen: FunctionSettings | None, default: str | None) -> AdvantageFn | None:
    if chosen is None and default is None:
        return None
    return _create(ADVANTAGES, chosen, default or "")


def _create(registry: Any, chosen: FunctionSettings | None, default: str) -> Any:
    function = chosen or FunctionSettings(default)
    return registry.create(function.name, function.args)
