"""Every engine gives the tokens and log-probabilities of the model, row by row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrft.producers.engines.engine import (
    EngineError,
    Interrupted,
    PromptTooLong,
    Request,
    Sampling,
    WeightsMismatch,
    open_engine,
    seed_of,
)
from streamrft.producers.engines.sampling import Sampler, truncated, uniforms

PROMPTS = [tuple(range(20 + 7 * i, 20 + 7 * i + 3 + 5 * i)) for i in range(4)]
END = 2


@pytest.fixture
def engine(tiny_model_dir):
    return open_engine(
        "transformers", str(tiny_model_dir), policy_version=3, branch="main", num_threads=1
    )


@pytest.fixture
def model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def requests(count: int, **sampling) -> list[Request]:
    args = Sampling(**{"max_tokens": 12, **sampling})
    return [
        Request(PROMPTS[i % len(PROMPTS)], args, seed_of(7, f"g.{i}", 0, 0)) for i in range(count)
    ]


def full_logprobs(model, request: Request, tokens, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*request.tokens, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.tokens) - 1 : -1].float() / temperature
    chosen = torch.tensor(tokens, dtype=torch.int64)[:, None]
    return logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward(engine, model, temperature):
    asked = requests(9, temperature=temperature, max_tokens=20)
    for request, made in zip(asked, engine.generate(asked), strict=True):
        expected = full_logprobs(model, request, made.tokens, temperature)
        assert np.abs(made.logprobs - expected).max() < 1e-4
        assert made.policy_versions.tolist() == [3] * len(made.tokens)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.4}, {"min_tokens": 6}])
def test_filters_leave_logprobs_of_the_full_softmax(engine, model, filters):
    asked = requests(6, **filters)
    for request, made in zip(asked, engine.generate(asked), strict=True):
        assert np.abs(made.logprobs - full_logprobs(model, request, made.tokens, 1.0)).max() < 1e-4


def test_greedy_equals_generate_of_transformers(engine, model):
    asked = requests(4, temperature=0.0, max_tokens=16)
    for request, made in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([list(request.tokens)])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        assert made.tokens.tolist() == expected[0, len(request.tokens) :].tolist()


def test_row_depends_on_its_own_seed_only(engine):
    asked = requests(8, max_tokens=30)
    together = engine.generate(asked)
    alone = [engine.generate([r])[0] for r in asked]
    reseeded = engine.generate([asked[0], *(Request(r.tokens, r.sampling, 5) for r in asked[1:])])
    for a, b in [*zip(together, alone, strict=True), (together[0], reseeded[0])]:
        assert a.tokens.tolist() == b.tokens.tolist()
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    assert len({tuple(g.tokens) for g in together}) == 8


def test_rows_that_do_not_fit_the_cache_give_the_same_result(engine, tiny_model_dir):
    small = open_engine(
        "transformers", str(tiny_model_dir), policy_version=3, branch="main", kv_cache_bytes=40_000
    )
    asked = requests(11)
    for a, b in zip(engine.generate(asked), small.generate(asked), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


def test_end_token_stops_a_row_and_limits_cut_the_others(engine):
    asked = [
        Request(PROMPTS[0], Sampling(max_tokens=1 + i % 40), seed_of(1, "g", i, 0))
        for i in range(300)
    ]
    made = engine.generate(asked)
    assert {g.finish_reason for g in made} == {"stop", "length"}
    for request, g in zip(asked, made, strict=True):
        assert END not in g.tokens[:-1]
        if g.finish_reason == "stop":
            assert g.tokens[-1] == END
        else:
            assert len(g.tokens) == request.sampling.max_tokens


def test_min_tokens_hold_back_the_end(engine):
    asked = [
        Request(PROMPTS[0], Sampling(max_tokens=6, min_tokens=5), seed_of(1, "g", i, 0))
        for i in range(2_000)
    ]
    made = engine.generate(asked)
    assert all(END not in g.tokens[:5] for g in made)
    assert any(g.tokens[5] == END for g in made)


def test_samples_follow_the_softmax():
    """Chi-square over 40,000 draws of a vocabulary of 8, at two temperatures."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 0.1, 1.5])
    count = 20_000
    for temperature in (1.0, 0.5):
        asked = [
            Request((1,), Sampling(temperature=temperature), seed_of(3, "g", i, 0))
            for i in range(count)
        ]
        sampler = Sampler(asked, torch.tensor([], dtype=torch.int64), torch.device("cpu"))
        expected = (logits.double() / temperature).softmax(-1).numpy() * count
        for step in (0, 5):
            tokens, logprobs = sampler.draw(logits.expand(count, -1), step)
            found = np.bincount(tokens.numpy(), minlength=8)
            assert ((found - expected) ** 2 / expected).sum() < 24.3  # 99.9 % at 7 degrees
        assert np.allclose(logprobs.exp().numpy(), expected[tokens] / count, atol=1e-6)


def test_uniforms_are_uniform_and_uncorrelated():
    seeds = np.array([seed_of(0, "g", i, 0) for i in range(5_000)], dtype=np.uint64)
    first, second = uniforms(seeds, 0), uniforms(seeds, 1)
    for u in (first, second):
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        assert ((counts - 250) ** 2 / 250).sum() < 43.8  # 99.9 % at 19 degrees
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_top_k_and_top_p_keep_the_likeliest():
    chances = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(4, -1).double()
    kept = truncated(chances, torch.tensor([-1, 2, -1, 3]), torch.tensor([1.0, 1.0, 0.5, 0.5]))
    assert (kept > 0).int().tolist() == [
        [1, 1, 1, 1],
        [0, 1, 0, 1],
        [0, 1, 0, 1],  # 0.4 is below half, 0.4 + 0.3 above
        [0, 1, 0, 1],  # 0.5 of the 0.9 that top k leaves
    ]
    assert kept[0].tolist() == chances[0].tolist()


def test_large_batches_are_drawn_in_slices(monkeypatch):
    monkeypatch.setattr("streamrft.producers.engines.sampling._SLICE", 64)
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    asked = [
        Request((1,), Sampling(top_k=i % 5, min_tokens=i % 2), seed_of(3, "g", i, 0))
        for i in range(50)
    ]
    end = torch.tensor([3])
    sliced = Sampler(asked, end, torch.device("cpu")).draw(logits, 0)
    monkeypatch.setattr("streamrft.producers.engines.sampling._SLICE", 1 << 25)
    whole = Sampler(asked, end, torch.device("cpu")).draw(logits, 0)
    assert torch.equal(sliced[0], whole[0]) and torch.equal(sliced[1], whole[1])
    assert Counter(sliced[0].tolist())[3] < 50


def changed(model) -> dict[str, torch.Tensor]:
    return {
        name: tensor + 0.05 * torch.sin(torch.arange(tensor.numel()).reshape(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


def test_new_weights_serve_from_the_next_call_on(engine, model):
    asked = requests(3)
    before = engine.generate(asked)
    state = changed(model)
    engine.load_weights(state, 4, "main.3")
    after = engine.generate(asked)
    model.load_state_dict(state, strict=False)
    for request, old, new in zip(asked, before, after, strict=True):
        assert (new.branch, set(new.policy_versions)) == ("main.3", {4})
        assert np.abs(new.logprobs - full_logprobs(model, request, new.tokens, 1.0)).max() < 1e-4
        assert old.tokens.tolist() != new.tokens.tolist()


def test_tied_weights_may_be_repeated_but_not_differ(engine, model):
    state = changed(model)
    tied = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    engine.load_weights(tied, 4, "main")
    with pytest.raises(WeightsMismatch, match="lm_head.weight differs"):
        engine.load_weights(tied | {"lm_head.weight": tied["lm_head.weight"] + 1}, 5, "main")
    assert engine.policy_version == 4


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_wrong_weights_leave_the_old_version_serving(engine, model, fault):
    asked = requests(3)
    before = engine.generate(asked)
    state = changed(model)
    name = "model.norm.weight"
    if fault == "missing":
        del state[name]
    elif fault == "unknown":
        state["model.extra.weight"] = torch.zeros(3)
    else:
        state[name] = torch.zeros(3)
    with pytest.raises(WeightsMismatch, match="extra" if fault == "unknown" else "norm"):
        engine.load_weights(state, 4, "main")
    after = engine.generate(asked)
    assert [g.tokens.tolist() for g in before] == [g.tokens.tolist() for g in after]
    assert engine.policy_version == 3


def test_prompt_without_room_is_refused_with_its_place(engine):
    with pytest.raises(PromptTooLong, match=r"requests\[1\]: a prompt of 512 tokens"):
        engine.generate([*requests(1), Request(tuple([9] * 512), Sampling(), 0)])


def test_interrupt_ends_a_running_generation(engine):
    engine.interrupt()
    with pytest.raises(Interrupted):
        engine.generate(requests(2))


def test_unknown_engine_is_named(tiny_model_dir):
    with pytest.raises(EngineError, match="sglang"):
        open_engine("sglang", str(tiny_model_dir))
