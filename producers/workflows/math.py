"""Mathematics with a known answer: the prompts and rewards that GSM8K is trained with."""

from __future__ import annotations

from .chat import Message
from .simple import SimpleWorkflow
from .workflow import WORKFLOWS, GroupTask

# DeepSeek-R1, arXiv:2501.12948, table 1
_THINK_ANSWER = """\
A conversation between User and Assistant. The user asks a question, and the Assistant solves it. \
The assistant first thinks about the reasoning process in the mind and then provides the user with \
the answer. The reasoning process and answer are enclosed within <think> </think> and \
<answer> </answer> tags, respectively, i.e.,
<think> reasoning process here </think>
<answer> answer here </answer>.
"""
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@WORKFLOWS.register("math_workflow")
@WORKFLOWS.register("async_math_workflow")
class MathWorkflow(SimpleWorkflow):
    """Thoughts and answer in tags, asked for by a system prompt unless the taskset has its own."""

    default_reward = "math_reward"
    _system_prompt = _THINK_ANSWER

    def messages(self, group: GroupTask) -> list[Message]:
        """With the system prompt that the workflow's own reward expects."""
        messages = super().messages(group)
        is_own = group.reward_name == self.default_reward
        if is_own and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages


@WORKFLOWS.register("math_boxed_workflow")
@WORKFLOWS.register("async_math_boxed_workflow")
class MathBoxedWorkflow(MathWorkflow):
    """The answer in a box."""

    default_reward = "math_boxed_reward"
    _system_prompt = _BOXED
