"""The quickstart's reward: 1 when the response is the digits in order, else 0."""

from streamrft.producers.rewards import REWARDS


@REWARDS.register("sorted_digits")
class SortedDigits:
    """A reward function gives named parts; `rewards.<part>.weight` in the YAML weighs them."""

    def __call__(self, rollout):
        return {"accuracy": float(rollout.response == rollout.truth)}
