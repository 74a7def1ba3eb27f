"""The verb `list`, apart from the others: it imports nothing heavy, and answers at once."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from headrace.cli.verbs import JsonVerb, Verb
from headrace.tools.listing import describe_env, describe_family, describe_list, facts, find


@dataclass(frozen=True, kw_only=True)
class _List(JsonVerb):
    family: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="FAMILY", help_behavior_hint="")
    ] = ""
    """A family, or the id of an environment. Default: all families."""

    def execute(self, argv: list[str]) -> None:
        """Print families, the ids of one, or what is known of one id; UsageError."""
        if not self.family:
            self.answer(facts(), describe_list())
            return
        family, env_id = find(self.family)
        text = describe_env(family, env_id) if env_id else describe_family(family)
        self.answer(facts(family, env_id), text)


FLAGS: dict[str, type[Verb]] = {"list": _List}
