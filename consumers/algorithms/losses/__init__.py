"""What a step minimises: one loss a trained token, by the names of policy_loss_fn."""

from . import cispo, critic, gspo, mix, ppo, preference, rec, reinforce, sapo, sft, sppo

__all__ = [
    "cispo",
    "critic",
    "gspo",
    "mix",
    "ppo",
    "preference",
    "rec",
    "reinforce",
    "sapo",
    "sft",
    "sppo",
]
