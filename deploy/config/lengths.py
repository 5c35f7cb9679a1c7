"""Prompt, response and model length: Trinity's arithmetic, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.errors import ConfigError
from .checks import rolls_out
from .schema import Config


@dataclass(frozen=True)
class Lengths:
    """Tokens. `model` bounds prompt and response together; None where only SFT runs, unbounded."""

    prompt: int
    response: int
    model: int | None


def lengths_of(config: Config) -> Lengths:
    """Fill in what was left out: the rest of max_model_len, half each, or the sum.

    Raises:
        ConfigError: too little is given, or the parts do not fit.
    """
    rollout, model = config.explorer.rollout_model, config.model
    total = rollout.max_model_len or model.max_model_len
    prompt = rollout.max_prompt_tokens or model.max_prompt_tokens
    response = rollout.max_response_tokens or model.max_response_tokens
    if not rolls_out(config) and total is None and not (prompt and response):
        return Lengths(0, 0, None)
    if total is None:
        if not (prompt and response):
            raise ConfigError(
                "model.max_model_len: missing; give it, or max_prompt_tokens and "
                "max_response_tokens."
            )
        total = prompt + response
    if prompt is None and response is None:
        response = total // 2
    prompt = total - (response or 0) if prompt is None else prompt
    response = total - prompt if response is None else response
    _check(prompt, response, total, rollout.min_response_tokens or model.min_response_tokens)
    return Lengths(prompt, response, total)


def _check(prompt: int, response: int, total: int, least: int) -> None:
    if prompt < 1 or response < 1:
        raise ConfigError(
            f"model.max_model_len: {total} found, which leaves {prompt} tokens for the prompt and "
            f"{response} for the response. Raise it, or lower max_prompt_tokens or "
            "max_response_tokens."
        )
    if prompt + response > total:
        raise ConfigError(
            f"model.max_model_len: {total} found, less than max_prompt_tokens {prompt} + "
            f"max_response_tokens {response} = {prompt + response}."
        )
    if least > response:
        raise ConfigError(
            f"model.min_response_tokens: {least} found, more than max_response_tokens {response}."
        )
