"""The batch of the training benchmarks: real text of mixed lengths, the same tokens for everybody.

GSM8K's questions are prompts, its answers responses; a response is one to three answers, so that
lengths spread as those of rollouts do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS = Path(__file__).parents[2] / "examples" / "grpo_gsm8k" / "data" / "train.jsonl"
GROUP_SIZE = 8


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt; log-probs are of the behaviour policy, a token each."""

    prompt: str
    prompt_ids: list[int]
    responses: list[list[int]]
    rewards: list[float]
    logprobs: list[list[float]]


@dataclass(frozen=True)
class Pair:
    """Texts, for TRL's own tokenisation, and what they must come to."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


@dataclass(frozen=True)
class Batch:
    """One step's groups for GRPO and pairs for DPO."""

    groups: list[Group]
    pairs: list[Pair]

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Batch:
        """Undo `save`."""
        plain = json.loads(path.read_text())
        return cls([Group(**g) for g in plain["groups"]], [Pair(**p) for p in plain["pairs"]])

    def sequences(self, kind: str) -> list[tuple[list[int], list[int]]]:
        """(prompt, response) of every sequence that a step of `kind` trains."""
        if kind == "grpo":
            return [(g.prompt_ids, r) for g in self.groups for r in g.responses]
        return [(p.prompt_ids, r) for p in self.pairs for r in (p.chosen_ids, p.rejected_ids)]


def digest(sequences: Iterable[tuple[list[int], list[int]]]) -> str:
    """Of the tokens, whatever their order: two who give the same trained on the same."""
    lines = sorted(json.dumps([list(map(int, p)), list(map(int, r))]) for p, r in sequences)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def our_sequence(prompt: list[int], response: list[int], logprobs: list[float]) -> Any:
    """As the trainer's sources give it: TrainingSequence of a prompt and what the policy wrote."""
    from streamrft.consumers.learning.examples import TrainingSequence

    return TrainingSequence(
        np.array(prompt + response, np.int32),
        np.repeat([0, 1], [len(prompt), len(response)]).astype(np.uint8),
        np.concatenate([np.zeros(len(prompt)), logprobs]).astype(np.float32),
    )


def our_group(number: int, group: Group) -> Iterator[Any]:
    """TrainingExample of each rollout of a group."""
    from streamrft.consumers.learning.examples import TrainingExample

    for i, (response, logprobs) in enumerate(zip(group.responses, group.logprobs, strict=True)):
        yield TrainingExample(
            f"g.{number}:{i}:a", f"g.{number}", i, number,
            (our_sequence(group.prompt_ids, response, logprobs),),
            reward=group.rewards[i],
            group_rewards=tuple(group.rewards),
            group_slot_index=i,
        )  # fmt: skip


def build(model: Any, folder: str, *, max_answers: int, seed: int = 0) -> Batch:
    """One group and four pairs of the rows in examples/, by the tokenizer in `folder`.

    Responses are of up to `max_answers` answers, log-probs near the model's.
    """
    from transformers import AutoTokenizer

    rng = np.random.default_rng(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]

    def prompt(row: int) -> str:
        turns = [{"role": "user", "content": rows[row]["question"]}]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    def answer(num_parts: int) -> str:
        chosen = rng.integers(0, len(rows), num_parts)
        return "\n".join(rows[i]["answer"] for i in chosen) + tokenizer.eos_token

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    responses = [ids(answer(1 + i % max_answers)) for i in range(GROUP_SIZE)]
    rewards = rng.integers(0, 2, GROUP_SIZE).astype(float)
    rewards[:2] = 0.0, 1.0
    prompt_ids = ids(prompt(0))
    logprobs = _logprobs(model, prompt_ids, responses, rng)
    group = Group(prompt(0), prompt_ids, responses, rewards.tolist(), logprobs)
    pairs: list[Pair] = []
    for row in range(1, 5):
        texts = prompt(row), answer(1 + row % min(2, max_answers)), answer(1 + row % max_answers)
        pairs.append(Pair(*texts, *map(ids, texts)))
    return Batch([group], pairs)


def _logprobs(
    model: Any, prompt: list[int], responses: list[list[int]], rng: np.random.Generator
) -> list[list[float]]:
    """The model's own, off by 0.15 a token: ratios lie on both sides of the clip."""
    import torch

    found = []
    for response in responses:
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append((own.numpy() + rng.normal(0, 0.15, len(response))).tolist())
    return found
