"""Workflows: prompts by the model's template, masks that say who wrote what, gathered requests."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from streamrft.producers.announced import Announced
from streamrft.producers.engines.engine import Generation, PromptTooLong, Request, seed_of
from streamrft.producers.engines.service import EngineService
from streamrft.producers.progress import Progress, Ticket
from streamrft.producers.rewards import RolloutView
from streamrft.producers.rollouts import workflow_and_reward
from streamrft.producers.settings import ExplorerSettings, TasksetSettings
from streamrft.producers.threads import Worker, in_thread
from streamrft.producers.workflows import (
    WORKFLOWS,
    Chat,
    GroupTask,
    MathWorkflow,
    Prompt,
    RolloutFailed,
    SimpleWorkflow,
    Transcript,
)
from streamrft.schemas import arrays
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError, Timeout
from streamrft.streams.log import Partition
from streamrft.streams.registry import Registry

HI = [{"role": "system", "content": "sum"}, {"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def chat(tokenizer, **fields) -> Chat:
    return Chat(tokenizer, **{"max_prompt_tokens": 64, **fields})


def generation(tokens, versions=None, reason="stop") -> Generation:
    return Generation(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        policy_versions=np.array(versions or [3] * len(tokens), dtype=np.int32),
        branch="main",
        finish_reason=reason,
    )


# --- prompts


def test_prompt_is_that_of_the_models_own_template(tokenizer):
    prompt = chat(tokenizer).render(HI)
    expected = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert list(prompt.tokens) == expected and not prompt.is_truncated
    assert tokenizer.decode(prompt.tokens) == "<|system|>sum<|end|><|user|>1+1<|end|><|assistant|>"
    assert [(t.role, t.text) for t in prompt.turns] == [("system", "sum"), ("user", "1+1")]
    (system, user) = prompt.turns
    assert tokenizer.decode(prompt.tokens[system.start : system.end]) == "<|system|>sum<|end|>"
    assert (user.start, user.end) == (system.end, len(prompt.tokens))


def test_reply_prefix_follows_the_template_and_is_not_the_policys(tokenizer):
    prompt = chat(tokenizer).render(HI, "<think>")
    assert tokenizer.decode(prompt.tokens).endswith("<|assistant|><think>")
    assert prompt.turns[-1].role == "assistant" and prompt.turns[-1].text == "<think>"


def test_template_may_be_replaced_by_text_or_file(tokenizer, tmp_path):
    text = "{{ messages[0]['content'] }}{% if enable_thinking %}!{% endif %}"
    (tmp_path / "chat.jinja").write_text(text)
    for template in (text, str(tmp_path / "chat.jinja")):
        for thinking, end in ((True, "!"), (False, ""), (None, "")):
            made = chat(tokenizer, template=template, enable_thinking=thinking).render(HI)
            assert tokenizer.decode(made.tokens) == f"sum{end}"


def test_model_without_a_template_is_named(tokenizer):
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template. Set model.custom_chat_template"):
        chat(bare).render(HI)
    assert chat(bare, template="{{ messages[0].content }}").render(HI).tokens


def test_messages_without_a_known_boundary_share_a_range(tokenizer):
    template = (
        "{% if messages|length < 2 %}{{ raise_exception('two at least') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    turns = chat(tokenizer, template=template).render(HI).turns
    assert [(t.start, t.end) for t in turns] == [(0, 0), (0, 6)]


def test_long_prompt_loses_its_start_and_says_so(tokenizer):
    whole = chat(tokenizer).render(HI)
    cut = chat(tokenizer, max_prompt_tokens=7).render(HI)
    assert cut.tokens == whole.tokens[-7:] and cut.is_truncated
    assert [(t.role, t.start, t.end) for t in cut.turns] == [("system", 0, 1), ("user", 1, 7)]


def test_long_prompt_fails_where_truncation_is_off(tokenizer):
    with pytest.raises(RolloutFailed, match="has 11 tokens, 7 are allowed"):
        chat(tokenizer, max_prompt_tokens=7, truncate=False).render(HI)


# --- transcripts


def test_transcript_marks_what_the_policy_wrote():
    transcript = Transcript(Prompt((5, 6), (ev.Turn(role="user", start=0, end=2, text="q"),)))
    transcript.write(generation([7, 8], [3, 3]), "a")
    transcript.show([9], role="tool", text="t")
    assert transcript.tokens == (5, 6, 7, 8, 9)
    transcript.write(generation([10, 2], [3, 4], "length"), "b")
    s = transcript.sequence(0.0)
    assert arrays.ints(s.tokens).tolist() == [5, 6, 7, 8, 9, 10, 2]
    assert arrays.mask(s.loss_mask).tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert arrays.floats(s.logprobs).tolist() == [0, 0, -1, -2, 0, -1, -2]
    assert arrays.unpack_runs(s.policy_versions).tolist() == [3, 3, 3, 4]
    assert (s.temperature, s.truncated) == (1.0, True)
    assert [(t.role, t.start, t.end) for t in s.turns] == [
        ("user", 0, 2),
        ("assistant", 2, 4),
        ("tool", 4, 5),
        ("assistant", 5, 7),
    ]


# --- workflows


def group(tokenizer, row, workflow="w", slots=(0, 2), **fields) -> tuple[GroupTask, list]:
    """A group whose engine answers the slot's seed as text; the requests that it saw."""
    asked: list[Request] = []

    async def engine(requests):
        asked.extend(requests)
        return [generation([*tokenizer.encode("72"), 2]) for _ in requests]

    task = ev.Task(
        group_id="t.4",
        number=4,
        taskset="t",
        row=0,
        epoch=0,
        branch="main",
        step=1,
        min_policy_version=0,
        group_size=3,
        workflow=workflow,
        content="{}",
        produced_at=0,
    )
    made = GroupTask(
        **{
            "task": task,
            "row": row,
            "taskset": TasksetSettings(name="t", path="-"),
            "slots": list(slots),
            "trajectory_ids": {},
            "sampling": None,
            "chat": chat(tokenizer, max_prompt_tokens=2_000),
            "run_seed": 7,
            "engine": engine,
            "reward": None,
            "reward_name": "",
            **fields,
        }
    )
    return made, asked


def run(workflow: Any, made: GroupTask) -> list:
    class Sampling:
        temperature = 1.0

    made.sampling = Sampling()  # type: ignore[assignment]
    return asyncio.run(workflow.run(made))


def test_simple_workflow_gives_each_open_slot_its_own_seed(tokenizer):
    made, asked = group(tokenizer, {"prompt": "40+32"})
    rollouts = run(SimpleWorkflow(), made)
    assert [r.seed for r in asked] == [seed_of(7, "t.4", 0, 0), seed_of(7, "t.4", 2, 0)]
    assert len(set(asked)) == 2 and asked[0].tokens == asked[1].tokens
    assert [r.finish_reason for r in rollouts] == ["stop", "stop"]
    assert rollouts[0].sequences[0].turns[-1].text == "72" and rollouts[0].scores == []
    assert rollouts[0].metrics["response_length"] == 3
    assert made.branches == {0: {"main"}, 2: {"main"}}


def test_reward_function_sees_prompt_response_truth_and_row(tokenizer):
    seen: list[RolloutView] = []

    def reward(view):
        seen.append(view)
        return {"right": float(view.response.endswith(view.truth))}

    row = {"prompt": "40+32", "response": "so\n#### 72", "more": 1}
    chosen = TasksetSettings(name="t", path="-", reply_prefix="I say ")
    made, _ = group(tokenizer, row, reward=reward, taskset=chosen)
    rollouts = run(SimpleWorkflow(), made)
    assert rollouts[1].scores == [ev.Score(source="right", value=1.0)]
    assert seen[0] == RolloutView("40+32", "I say 72", "72", row, 3, "stop")


def test_reward_runs_off_the_event_loop(tokenizer):
    names: list[str] = []

    def reward(view):
        names.append(threading.current_thread().name)
        return {"a": 1}

    made, _ = group(tokenizer, {"prompt": "x"}, reward=reward)
    run(SimpleWorkflow(), made)
    assert threading.main_thread().name not in names


@pytest.mark.parametrize("aborts", [True, False])
def test_reward_that_takes_too_long_fails_its_rollout_or_the_deterministic_run(tokenizer, aborts):
    def reward(view):
        raise Timeout("the judge", 5)

    made, _ = group(tokenizer, {"prompt": "x"}, reward=reward, abort_on_timeout=aborts)
    if aborts:
        with pytest.raises(Timeout):
            run(SimpleWorkflow(), made)
    else:
        assert all("the judge" in r.failure for r in run(SimpleWorkflow(), made))


def test_math_workflow_asks_for_thoughts_unless_told_otherwise(tokenizer):
    made, _ = group(tokenizer, {"prompt": "1+1"}, reward_name="math_reward")
    first, second = MathWorkflow().messages(made)
    assert first["role"] == "system" and "<think>" in first["content"]
    assert second == {"role": "user", "content": "1+1"}
    made.taskset = TasksetSettings(name="t", path="-", system_prompt="mine")
    assert MathWorkflow().messages(made)[0]["content"] == "mine"
    made, _ = group(tokenizer, {"prompt": "1+1"}, reward_name="my_reward")
    assert len(MathWorkflow().messages(made)) == 1


def test_workflow_brings_its_reward_and_a_task_may_name_another():
    chosen = TasksetSettings(name="t", path="-")
    assert workflow_and_reward(chosen, "math_workflow", "")[1] == "math_reward"
    assert workflow_and_reward(chosen, "math_boxed_workflow", "")[1] == "math_boxed_reward"
    assert workflow_and_reward(chosen, "math_workflow", "format_reward")[1] == "format_reward"
    assert workflow_and_reward(chosen, "async_simple_workflow", "")[2] is None
    path = "streamrft.producers.workflows.simple.SimpleWorkflow"
    assert isinstance(workflow_and_reward(chosen, path, "")[0], SimpleWorkflow)


def test_workflow_without_async_run_is_refused():
    WORKFLOWS.register("sync_one")(type("Sync", (), {"run": lambda self, group: []}))
    with pytest.raises(ConfigError, match="needs `async def run"):
        workflow_and_reward(TasksetSettings(name="t", path="-"), "sync_one", "")


def test_function_may_be_registered_with_arguments():
    registry = Registry("thing", binds_functions=True)
    registry.register("add")(lambda a, b=1: a + b)
    assert registry.create("add", {"b": 5})(1) == 6


# --- the engine's service


class FakeEngine:
    policy_version, branch, max_prompt_tokens = 0, "main", 9

    def __init__(self) -> None:
        self.calls: list[int] = []

    def generate(self, requests):
        self.calls.append(len(requests))
        return [generation([r.seed]) for r in requests]

    def interrupt(self) -> None: ...


@pytest.fixture
def service():
    made = EngineService(ExplorerSettings(tasksets=()))
    made._engine, made._chat = FakeEngine(), object()  # type: ignore[assignment]
    made.wanted = made._loaded = ev.Checkpoint(
        branch="main",
        step=0,
        kind="full",
        uri="u",
        digest="d",
        manifest_sha256="m",
        epoch=1,
        produced_at=0,
    )
    yield made
    made.stop()


def ask(seed: int, tokens: int = 1) -> Request:
    return Request((1,) * tokens, None, seed)  # type: ignore[arg-type]


def test_groups_that_run_together_are_generated_in_one_call(service):
    async def body():
        service.num_active = 3
        return await asyncio.gather(*(service.generate([ask(i), ask(i + 10)]) for i in range(3)))

    made = asyncio.run(body())
    assert [[g.tokens[0] for g in part] for part in made] == [[0, 10], [1, 11], [2, 12]]
    assert service._engine.calls == [6]


def test_call_does_not_wait_for_a_group_that_does_something_else(service):
    async def body():
        service.num_active = 2
        return await asyncio.wait_for(service.generate([ask(1)]), 5)

    assert asyncio.run(body())[0].tokens.tolist() == [1]


def test_too_long_prompt_fails_alone(service):
    async def body():
        service.num_active = 2
        return await asyncio.gather(
            service.generate([ask(1)]), service.generate([ask(2, 10)]), return_exceptions=True
        )

    good, bad = asyncio.run(body())
    assert good[0].tokens.tolist() == [1] and isinstance(bad, PromptTooLong)


def test_failure_of_the_engine_reaches_every_caller(service):
    def broken(requests):
        raise RuntimeError("out of memory")

    service._engine.generate = broken

    async def body():
        service.num_active = 2
        return await asyncio.gather(
            *(service.generate([ask(i)]) for i in range(2)), return_exceptions=True
        )

    assert [str(e) for e in asyncio.run(body())] == [
        "the engine failed: RuntimeError: out of memory"
    ] * 2


def test_worker_keeps_order_and_passes_errors_on():
    async def body():
        worker = Worker("w")
        done: list[int] = []
        await asyncio.gather(*(worker.call(done.append, i) for i in range(5)))
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        assert await in_thread(max, 1, 2) == 2
        for ends in (lambda: sys.exit(3), lambda: next(iter(()))):
            with pytest.raises(RuntimeError, match="^(SystemExit: 3|StopIteration: )$"):
                await asyncio.wait_for(in_thread(ends), 60)
        worker.stop(1)
        return done

    assert asyncio.run(body()) == list(range(5))


# --- what is committed, what is served


def test_only_the_contiguous_prefix_is_committed():
    progress, a, b = Progress(), Partition("t", 0), Partition("t", 1)
    tickets = [Ticket(p, o) for p, o in [(a, 3), (a, 4), (a, 7), (b, 0)]]
    for ticket in tickets:
        progress.take(ticket)
    tickets[1].is_done = True
    assert progress.finish() == {}
    tickets[0].is_done = True
    assert progress.finish() == {a: 5}
    tickets[2].is_done = tickets[3].is_done = True
    assert progress.finish() == {a: 8, b: 1} and progress.finish() == {}


def test_lost_partitions_are_forgotten():
    progress, a = Progress(), Partition("t", 0)
    ticket = Ticket(a, 3)
    progress.take(ticket)
    assert progress.give_up([a]) == [ticket] and ticket.is_given_up
    ticket.is_done = True
    again = Ticket(a, 3)
    progress.take(again)
    assert progress.finish() == {}


def weights(step: int, branch: str = "main", kind="weights") -> ev.Checkpoint:
    return ev.Checkpoint(
        branch=branch,
        step=step,
        kind=kind,
        uri="u",
        digest=f"{branch}{step}",
        manifest_sha256="m",
        epoch=1,
        produced_at=0,
    )


def test_newest_weights_of_the_surviving_branch_are_served():
    announced = Announced()
    assert announced.newest is None
    for step in (0, 5, 3):
        announced.on_event(weights(step))
    assert announced.newest == weights(5)
    announced.on_event(ev.Branch(branch="b", parent="main", step=3, produced_at=0))
    assert announced.newest == weights(3) and announced.branch == "b"
    announced.on_event(weights(6))
    assert announced.newest == weights(3)
    announced.on_event(weights(4, "b"))
    assert announced.newest == weights(4, "b")
