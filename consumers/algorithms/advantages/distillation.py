"""Learning from a teacher's log-probs of the student's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....schemas.errors import ConfigError
from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, Values, trained


@ADVANTAGES.register("on_policy_distill")
@dataclass(frozen=True)
class DistillationAdvantage:
    """A_t = kl_coef (log q(y_t) - log p(y_t)), q the teacher, p the policy that wrote the token.

    The policy gradient of the reverse KL(p || q). Source: on-policy distillation, GKD,
    arXiv:2306.13649; MiniLLM, arXiv:2306.08543.
    """

    kl_coef: float = 1.0

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience; its sequences carry teacher_logprobs."""
        return [
            self.kl_coef * (trained(e, "teacher_logprobs") - trained(e, "logprobs"))
            for e in examples
        ]


@ADVANTAGES.register("jsd")
@dataclass(frozen=True)
class JensenShannonAdvantage:
    """A_t = -kl_coef JSD_t, the token's own term of the divergence.

    JSD_t = lambda q log(q / m) + (1 - lambda) p log(p / m) with m = lambda q + (1 - lambda) p,
    p = p(y_t) of the policy and q = q(y_t) of the teacher. It is 0 where they agree and where
    lambda is 0 or 1. Source: GKD, arXiv:2306.13649.

    Args:
        lambda_coef: the teacher's share of the mixture, 0 to 1.
        temperature: only 1: both log-probs are those of the record.
        chunk_size: accepted and not needed: no vocabulary is held.
    """

    lambda_coef: float = 0.5
    kl_coef: float = 1.0
    temperature: float = 1.0
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lambda_coef <= 1:
            raise ConfigError(
                f"algorithm.advantage_fn_args: lambda_coef {self.lambda_coef} must lie in [0, 1]."
            )
        if self.temperature != 1:
            raise ConfigError(
                f"algorithm.advantage_fn_args: temperature {self.temperature} is not available "
                "for jsd, only 1 is: the record holds log-probs, not distributions."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience; its sequences carry teacher_logprobs."""
        return [
            -self.kl_coef
            * jensen_shannon(
                trained(e, "logprobs"), trained(e, "teacher_logprobs"), self.lambda_coef
            )
            for e in examples
        ]


def jensen_shannon(student: Values, teacher: Values, share: float) -> Values:
    """JSD_t [n] of log-probs [n] each; `share` is lambda."""
    if share in (0, 1):
        return np.zeros_like(student)
    mixture = np.logaddexp(np.log(share) + teacher, np.log(1 - share) + student)
    return share * np.exp(teacher) * (teacher - mixture) + (1 - share) * np.exp(student) * (
        student - mixture
    )
