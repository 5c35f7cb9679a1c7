"""Distance of the policy to the reference model, one value a token, by Trinity's names.

With d = logp - ref_logp under tokens of the behaviour policy. Source: J. Schulman,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...schemas.errors import ConfigError
from .registry import KL_LOSSES

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class KlLoss:
    """An estimator and its coefficient in the loss; with coefficient 0 nothing is computed.

    Args:
        kl_coef: the first coefficient where it is adaptive.
        target_kl: what an adaptive coefficient steers the KL to; None keeps it as it is.
        horizon: experiences after which it has followed; 10000 in Ziegler et al.

    Source of the steering: Ziegler et al., arXiv:1909.08593, section 2.2.
    """

    estimator: Estimator
    kl_coef: float = 0.001
    target_kl: float | None = None
    horizon: float = 10_000.0

    @property
    def is_active(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl_coef != 0

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """[N] each -> [N], not yet multiplied by the coefficient."""
        return self.estimator(logprobs, ref_logprobs, old_logprobs)

    def next_coef(self, coef: float, kl: float, num_experiences: int) -> float:
        """The coefficient of the next step: coef (1 + e n / horizon), e = KL / target - 1.

        e is clamped to +-0.2, and n / horizon to 1, or the coefficient could fall below 0; a KL
        that is not finite changes nothing.
        """
        if self.target_kl is None or not math.isfinite(kl):
            return coef
        error = min(max(kl / self.target_kl - 1, -0.2), 0.2)
        return coef * (1 + error * min(1.0, num_experiences / self.horizon))


def _register(name: str) -> Callable[[Estimator], Estimator]:
    def file(estimator: Estimator) -> Estimator:
        def create(
            kl_coef: float = 0.001,
            adaptive: bool = False,
            target_kl: float | None = None,
            horizon: float | None = None,
        ) -> KlLoss:
            if not adaptive:
                return KlLoss(estimator, kl_coef)
            if not target_kl or target_kl <= 0 or not horizon or horizon <= 0:
                raise ConfigError(
                    f"algorithm.kl_loss_fn_args: adaptive with target_kl {target_kl} and horizon "
                    f"{horizon}; both must be above 0, such as 0.1 and 10000."
                )
            return KlLoss(estimator, kl_coef, target_kl, horizon)

        KL_LOSSES.register(name)(create)
        return estimator

    return file


@KL_LOSSES.register("none")
def none(**ignored: Any) -> KlLoss:
    """No term and no reference model."""
    return KlLoss(k1, kl_coef=0.0)


@_register("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Unbiased: d."""
    return logprobs - ref_logprobs


@_register("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Low variance, gradient of the KL: d^2 / 2."""
    return (logprobs - ref_logprobs).square() / 2


@_register("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Unbiased and never negative: e^-d - 1 + d. Source: DeepSeekMath, arXiv:2402.03300, eq. 4."""
    d = logprobs - ref_logprobs
    return (-d).exp() - 1 + d


@_register("low_var_kl")
def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k3 with d clamped to +-20 and the result to +-10."""
    d = (logprobs - ref_logprobs).clamp(-20, 20)
    return ((-d).exp() - 1 + d).clamp(-10, 10)


@_register("abs")
def absolute(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """|d|."""
    return (logprobs - ref_logprobs).abs()


@_register("corrected_k3")
def corrected_k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k3 under tokens of an older policy: weighted by exp(logp - old_logp), clamped to [0, 2]."""
    weight = (logprobs - old_logprobs).exp().clamp(0, 2)
    return weight * k3(logprobs, ref_logprobs, old_logprobs)
