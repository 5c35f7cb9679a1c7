"""A reward with a gradient for a model that is seldom right: a tenth for coming to an end."""

from streamrft.producers.rewards import REWARDS, AccuracyReward


@REWARDS.register("math_in_time")
class MathInTime:
    """accuracy: 1 for a right final answer; finished: 0.1 for ending within the token limit."""

    def __init__(self):
        self.accuracy = AccuracyReward()

    def __call__(self, rollout):
        return self.accuracy(rollout) | {"finished": 0.1 * (rollout.finish_reason == "stop")}
