"""Classes of settings: what was named, types, and bounds beside the field."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import pytest

from headrace.config.algorithms import ALGORITHMS
from headrace.config.run_config import GROUPS, RunConfig
from headrace.configclass import Between, configclass, explicit_values
from headrace.errors import ConfigError
from headrace.models.policy import Network


@configclass
class Small:
    rate: Annotated[float, Between(0, 1)] = 0.5
    count: Annotated[int, Between(1, minus_one="all")] = 1
    sizes: Annotated[tuple[int, ...], Between(1)] = ()
    kind: Literal["a", "b"] = "a"
    limit: float | None = None


def test_values_are_converted_to_the_field_s_type():
    small = Small(rate=1, sizes=[3, 4], count=-1, limit=2)
    assert (small.rate, small.sizes, small.count, small.limit) == (1.0, (3, 4), -1, 2.0)
    assert type(small.rate) is type(small.limit) is float
    assert explicit_values(small) == {"count": -1, "limit": 2.0, "rate": 1.0, "sizes": (3, 4)}
    assert Small(limit=None).limit is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate": 1.1}, "rate=1.1 (Small): expected at least 0 and at most 1."),
        ({"rate": float("nan")}, "rate=nan (Small): expected at least 0 and at most 1."),
        ({"count": 0}, "count=0 (Small): expected at least 1 (or -1: all)."),
        ({"count": 1.5}, "count=1.5 (Small): expected int."),
        ({"sizes": (3, 0)}, "sizes=(3, 0) (Small): expected at least 1."),
        ({"kind": "c"}, "kind='c' (Small): expected 'a' | 'b'."),
        ({"limit": "2"}, "limit='2' (Small): expected float."),
        ({"rat": 1.0}, "Small has no setting 'rat'."),
    ],
)
def test_values_out_of_type_or_bounds_are_refused(values, words):
    with pytest.raises(ConfigError) as caught:
        Small(**values)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "cls", [RunConfig, Network, *(algorithm.Config for algorithm in ALGORITHMS.values())]
)
def test_defaults_are_within_their_bounds(cls):
    assert dataclasses.replace(cls()) == cls()


def test_every_setting_of_a_run_is_in_one_group():
    names = [f.name for group in GROUPS.values() for f in dataclasses.fields(group)]
    assert names == [f.name for f in dataclasses.fields(RunConfig)]


def test_paths_become_text():
    run = RunConfig(
        init_from=Path("runs/a"), frozen={"tagger": Path("runs/b")}, league_members=[Path("c")]
    )
    assert run.init_from == "runs/a"
    assert run.frozen == {"tagger": "runs/b"}
    assert run.league_members == ("c",)
