"""The reward of DAPO: right or not, less what makes long answers dear."""

from __future__ import annotations

from .reward import REWARDS, RewardFailed, RolloutView
from .rules import accuracy


@REWARDS.register("math_dapo_reward")
class MathDapoReward:
    """accuracy 0 or 1, and format_score: the soft overlong penalty, 0 where it is not enabled.

    Of L tokens the penalty is 0 up to max_response_length - cache_length, falls linearly to
    -penalty_factor at max_response_length, and stays there.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """

    def __init__(
        self,
        enable_overlong_penalty: bool = False,
        penalty_factor: float = 1.0,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        """Lengths are tokens; both are needed where the penalty is enabled.

        Raises:
            ValueError: a length is missing, or cache_length is not within the response's.
        """
        if enable_overlong_penalty:
            if not max_response_length or not cache_length or cache_length > max_response_length:
                raise ValueError(
                    f"enable_overlong_penalty with max_response_length {max_response_length} and "
                    f"cache_length {cache_length}; both are needed, the second not above the first"
                )
        self._is_penalised, self._factor = enable_overlong_penalty, penalty_factor
        self._longest, self._cache = max_response_length or 0, cache_length or 1

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        right = accuracy(rollout.response, rollout.truth)
        return {"accuracy": right, "format_score": self._penalty(rollout)}

    def _penalty(self, rollout: RolloutView) -> float:
        if not self._is_penalised:
            return 0.0
        if rollout.num_tokens < 1:
            raise RewardFailed("the rollout does not say how many tokens its response has")
        over = rollout.num_tokens - (self._longest - self._cache)
        return -self._factor * min(max(over / self._cache, 0.0), 1.0)
