"""Requests for rows of the shipped recipes."""

from llmb.config.overrides import Setting
from llmb.config.recipe import load_all, shipped

ALL = load_all([shipped()])


def overrides(**fields):
    return tuple(Setting(field=k, value=v, source="--set") for k, v in fields.items())
