"""One prompt, one answer a slot, scored by a reward function when there is one."""

from __future__ import annotations

from ...schemas import events as ev
from ..engines.engine import Generation
from ..rewards.reward import RewardFailed, RolloutView
from ..tasksets import messages_of, truth_of
from .chat import Message, Prompt
from .transcript import Transcript
from .workflow import WORKFLOWS, GroupTask, Rollout


@WORKFLOWS.register("simple_workflow")
@WORKFLOWS.register("async_simple_workflow")
class SimpleWorkflow:
    """The row's messages through the chat template, then one generation for every slot."""

    default_reward = ""

    def messages(self, group: GroupTask) -> list[Message]:
        """The conversation before the answer; subclasses change it."""
        return messages_of(group.row, group.taskset, group.task.row)

    async def run(self, group: GroupTask) -> list[Rollout]:
        """See `Workflow.run`."""
        messages = self.messages(group)
        prefix = group.taskset.reply_prefix or ""
        prompt = group.chat.render(messages, prefix)
        made = await group.generate([prompt.tokens] * len(group.slots))
        texts = group.chat.decode([g.tokens.tolist() for g in made])
        truth = truth_of(group.row, group.taskset)
        asked = str(messages[-1].get("content", ""))
        views = [
            RolloutView(
                prompt=asked,
                response=prefix + text,
                truth=truth,
                row=group.row,
                num_tokens=len(generation.tokens),
                finish_reason=generation.finish_reason,
            )
            for text, generation in zip(texts, made, strict=True)
        ]
        parts = await group.score(views)
        return [
            _rollout(prompt, generation, text, part, group.sampling.temperature)
            for generation, text, part in zip(made, texts, parts, strict=True)
        ]


def _rollout(
    prompt: Prompt,
    generation: Generation,
    text: str,
    parts: dict[str, float] | RewardFailed,
    temperature: float,
) -> Rollout:
    if isinstance(parts, RewardFailed):
        return Rollout.failed(str(parts), is_final=parts.is_final)
    transcript = Transcript(prompt)
    transcript.write(generation, text)
    return Rollout(
        sequences=[transcript.sequence(temperature)],
        scores=[ev.Score(source=name, value=value) for name, value in parts.items()],
        finish_reason=generation.finish_reason,
        metrics={
            "prompt_length": float(len(prompt.tokens)),
            "response_length": float(len(generation.tokens)),
            "prompt_truncated": float(prompt.is_truncated),
        },
    )
