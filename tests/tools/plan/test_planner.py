"""Tests of the planner: brute force, the published case, errors, the command."""

import dataclasses
import itertools
import json
import math
import random
import sys
import tomllib

import pytest

from benchmarks import plan as benchmark
from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse
from headrace.cli.main import _main
from headrace.config.run_config import RunConfig
from headrace.errors import ConfigError, install_command
from headrace.tools.plan.goals import Budget, Need, Target, parse_budget, parse_need, parse_target
from headrace.tools.plan.machines import (
    Catalogue,
    MachineKind,
    SpotTerms,
    parse_catalogue,
    read_catalogue,
)
from headrace.tools.plan.planner import Planner
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.spot import make_plan
from tests import python
from tests.marks import repeats

RATES = Rates(250.0, 0.2, 3000.0, "cpu", 0, 4096, "CartPole-v1", "ppo", 0.0, 1, 1)
TABLE = {"date": "2026-11-23", "source": "a test", "currency": "USD"}
SMALL = {"price_per_h": 1.0, "cpus": 4, "gpus": 1, "learner_speed": 2.0}


def kinds(**of):
    return Catalogue(
        tuple(MachineKind(name, **each) for name, each in of.items()), "today", "me", "USD"
    )


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def changed(rates, **more):
    return Rates(**(vars(rates) | more))


# Brute force: every number of machines and of learners, and the formulas as the guide has them.


def hand_rate(rates, machines, learners, cpus_per_learner):
    """Env steps/s of `learners` by kind on `machines` by kind."""
    on = [kind for kind, n in learners.items() if n]
    if not on or len({bool(kind.gpus) for kind in on}) > 1:
        return 0.0
    share = min(8, math.floor(0.9 / rates.worker_cores + 1e-9)) or 1
    per_core = rates.worker_env_steps_per_s * share
    sampling = sum(
        per_core
        * kind.cpu_speed
        * (
            kind.cpus * n
            - (cpus_per_learner if kind.gpus else cpus_per_learner or 1) * learners[kind]
        )
        for kind, n in machines.items()
    )
    count = sum(learners.values())
    alone = count * min(kind.learner_speed or 1.0 for kind in on) * rates.learner_env_steps_per_s
    update_s = rates.batch / alone + (rates.allreduce_s if count > 1 else 0.0)
    learning = rates.batch / update_s
    if sampling <= 0:
        return 0.0
    return min(sampling, learning) if rates.lag else sampling * learning / (sampling + learning)


def hand_placed(machines, cpus_per_learner, rates, one_kind):
    """Every way to put learners on these machines."""
    most = []
    for kind, n in machines.items():
        taken = cpus_per_learner if kind.gpus else cpus_per_learner or 1
        places = kind.gpus or (kind.cpus if rates.learner_device == "cpu" else 0)
        most.append(n * min(places, kind.cpus // taken if taken else places))
    for learners in itertools.product(*(range(most_of + 1) for most_of in most)):
        if not one_kind or sum(map(bool, learners)) <= 1:
            yield dict(zip(machines, learners, strict=True))


def hand_all(cat, most):
    for counts in itertools.product(
        *(range(min(most, most if k.at_most is None else k.at_most) + 1) for k in cat.kinds)
    ):
        if cat.at_most is None or sum(counts) <= cat.at_most:
            machines = dict(zip(cat.kinds, counts, strict=True))
            yield machines, sum(kind.price_per_h * n for kind, n in machines.items())


def hand_best_rates(cat, rates, one_kind, most=4):
    """(cost, best rate) of all machines."""
    return [
        (
            cost,
            max(
                hand_rate(rates, machines, learners, cat.cpus_per_learner)
                for learners in hand_placed(machines, cat.cpus_per_learner, rates, one_kind)
            ),
        )
        for machines, cost in hand_all(cat, most)
    ]


def drawn(seed):
    """A small catalogue with at most 3 of each kind, and rates."""
    draw = random.Random(seed)
    rates = Rates(
        worker_env_steps_per_s=draw.uniform(50, 2000),
        worker_cores=draw.choice([0.05, 0.2, 0.45, 1.0]),
        learner_env_steps_per_s=draw.uniform(500, 10_000),
        learner_device=draw.choice(["cpu", "NVIDIA T4"]),
        lag=draw.choice([0, 0, 2]),
        batch=draw.choice([512, 4096]),
        env="CartPole-v1",
        algo="ppo",
        allreduce_s=draw.choice([0.0, 0.02, 0.2]),
        envs_per_worker=2,
        envs_per_vector=1,
    )
    kinds = [
        MachineKind(
            f"kind-{i}",
            price_per_h=round(draw.uniform(0.1, 3), 4),
            cpus=draw.choice([2, 4, 6] if gpus else [1, 2, 4, 6]),
            gpus=gpus,
            cpu_speed=draw.choice([1.0, 0.7, 1.4]),
            learner_speed=round(draw.uniform(0.5, 3), 2) if gpus else None,
            at_most=draw.choice([1, 2, 3]),
        )
        for i, gpus in enumerate([0, draw.choice([0, 1]), draw.choice([1, 2])])
    ]
    total = draw.choice([None, None, 4])
    cat = Catalogue(
        tuple(kinds), "d", "s", "USD", cpus_per_learner=draw.choice([0, 1, 2]), at_most=total
    )
    return cat, rates, draw.random() < 0.3, draw


@repeats("seed", range(30), keep=4)
def test_plan_is_as_good_as_brute_force(seed):
    cat, rates, one_kind, draw = drawn(seed)
    planner = Planner(cat, rates, one_kind)
    tried = hand_best_rates(cat, rates, one_kind)
    fastest = max(rate for _, rate in tried)
    for share in (0.1, 0.5, 0.9, 0.999):
        target = Target(fastest * share * 60, 60)
        cheapest = min(cost for cost, rate in tried if rate >= target.env_steps_per_s)
        plan = planner.plan(target).plan
        assert plan.cost_per_h == pytest.approx(cheapest, rel=1e-6), share
        assert plan.env_steps_per_s >= target.env_steps_per_s * (1 - 1e-4)
    with pytest.raises(ConfigError, match="These machines reach"):
        planner.plan(Target(fastest * 1.001 * 60, 60))
    least = min(cost for cost, rate in tried if rate)
    for budget in (least, least * 2, least * draw.uniform(1, 6)):
        best = max(rate for cost, rate in tried if cost <= budget + 1e-9)
        plan = planner.plan(Budget(budget, "USD")).plan
        assert plan.env_steps_per_s == pytest.approx(best, rel=1e-4)
        assert plan.cost_per_h <= budget + 1e-9
        assert plan.cost_per_h <= 1e-6 + min(cost for cost, rate in tried if rate >= best)


@repeats("seed", range(20), keep=5)
def test_prediction_agrees_with_formulas(seed):
    cat, rates, one_kind, _ = drawn(seed)
    answer = Planner(cat, rates, one_kind).plan(Budget(5.0, ""))
    for plan in filter(None, [answer.plan, *answer.without.values()]):
        machines = {kind: plan.machines[kind.name] for kind in plan.kinds}
        learners = {kind: plan.learners.get(kind.name, 0) for kind in plan.kinds}
        rate = hand_rate(rates, machines, learners, cat.cpus_per_learner)
        assert plan.env_steps_per_s == pytest.approx(rate)
        assert learners in list(hand_placed(machines, cat.cpus_per_learner, rates, one_kind))
        both = plan.sampling_env_steps_per_s, plan.learning_env_steps_per_s
        assert plan.limit == ("sampling" if both[0] < both[1] else "learning")
        fewer = [
            each
            for each in hand_placed(machines, cat.cpus_per_learner, rates, one_kind)
            if sum(each.values()) < sum(learners.values())
        ]
        for each in fewer:  # no learner that gains nothing
            assert hand_rate(rates, machines, each, cat.cpus_per_learner) < rate * (1 - 1e-7)


@repeats("seed", range(12), keep=4)
def test_learners_are_placed_for_highest_rate(seed):
    cat, rates, one_kind, _ = drawn(seed)
    fastest = max(rate for _, rate in hand_best_rates(cat, rates, one_kind))
    plan = Planner(cat, rates, one_kind).plan(Target(fastest * 0.3, 1)).plan
    machines = {kind: plan.machines[kind.name] for kind in plan.kinds}
    best = max(
        hand_rate(rates, machines, learners, cat.cpus_per_learner)
        for learners in hand_placed(machines, cat.cpus_per_learner, rates, one_kind)
    )
    assert plan.env_steps_per_s == pytest.approx(best, rel=1e-4)


def test_useless_learners_are_left_out():
    cat = kinds(a={"price_per_h": 1.0, "cpus": 4, "gpus": 8})
    cat = Catalogue(cat.kinds, "d", "s", "USD", cpus_per_learner=0)
    rates = changed(RATES, lag=2, learner_device="NVIDIA T4")  # 4,000 of workers, 3,000 each
    plan = Planner(cat, rates).plan(Target(2000, 1)).plan
    assert (plan.learners, plan.env_steps_per_s) == ({"a": 2}, 4000)


@repeats("seed", range(20), keep=6)
def test_need_is_met_at_least_cost(seed):
    cat, _, _, draw = drawn(seed)
    for need in (Need(2, 6), Need(0, 7), Need(3, 0), Need(draw.randint(0, 3), draw.randint(1, 9))):
        costs = []
        for machines, cost in hand_all(cat, 4):
            cpus = sum(kind.cpus * n for kind, n in machines.items())
            # Learners fit where their machine has cores for them.
            places = sum(
                n * min(k.gpus, k.cpus // cat.cpus_per_learner if cat.cpus_per_learner else k.gpus)
                for k, n in machines.items()
            )
            if places >= need.gpus and cpus - cat.cpus_per_learner * need.gpus >= need.cpus:
                costs.append(cost)
        if costs:
            found = Planner(cat).plan(need).plan
            assert found.cost_per_h == pytest.approx(min(costs), rel=1e-6)
            assert sum(found.learners.values()) == need.gpus
        else:
            with pytest.raises(ConfigError, match="No machines have"):
                Planner(cat).plan(need)


@repeats("seed", range(12), keep=4)
def test_runner_up_is_best_plan_without_one_kind(seed):
    cat, rates, one_kind, _ = drawn(seed)
    tried = hand_best_rates(cat, rates, one_kind)
    target = Target(max(rate for _, rate in tried) * 0.4 * 60, 60)
    answer = Planner(cat, rates, one_kind).plan(target)
    assert set(answer.without) == set(answer.plan.machines)
    expected = {}
    for name in answer.plan.machines:
        rest = tuple(kind for kind in cat.kinds if kind.name != name)
        left = Catalogue(rest, "d", "s", "USD", False, cat.cpus_per_learner, cat.at_most)
        costs = [
            cost
            for cost, rate in hand_best_rates(left, rates, one_kind)
            if rate >= target.env_steps_per_s
        ]
        plan = answer.without[name]
        assert bool(plan) == bool(costs)
        if plan:
            expected[name] = min(costs)
            assert plan.cost_per_h == pytest.approx(expected[name], rel=1e-6)
    if expected:
        assert expected[answer.runner_up] == min(expected.values())
    else:
        assert answer.runner_up is None


def test_published_case_is_reproduced():
    result, _ = benchmark.result()
    assert result["plan"]["machines"] == {"small-gpu": 8, "cpu": 4}
    assert result["plan"]["worker_cores"] == {"small-gpu": 32, "cpu": 32}
    assert result["plan"]["cost_per_h"] == pytest.approx(2.0456, abs=5e-5)
    assert result["ratio"] >= 1.7658
    assert result["without"]["small-gpu"]["machines"] == {"large": 1}
    assert result["runner_up"] == "cpu"
    assert any("only the sum" in text for text in result["assumed"])


def test_stored_results_of_published_case_are_current():
    kept = json.loads((benchmark.RESULTS / "plan.json").read_text())
    now = json.loads(json.dumps(benchmark.result()[0]))
    assert {name: kept[name] for name in now} == now


def test_guide_has_published_plan_and_all_keys():
    guide = (benchmark.ROOT / "docs/plan.md").read_text()
    assert benchmark.shown(*benchmark.result()) in guide
    example = guide.partition("```toml\n")[2].partition("```")[0]
    given = tomllib.loads(example)
    assert set(given) == (names(Catalogue) - {"kinds"}) | {"machines"}
    (machine,) = given["machines"].values()
    assert set(machine) == names(MachineKind) - {"name", "is_spot"}
    assert set(machine["spot"]) == names(SpotTerms) - {"kind"}
    assert parse_catalogue(given, "the guide").kinds[0].at_most == 8


def test_costly_allreduce_limits_number_of_learners():
    cat = kinds(a={"price_per_h": 1.0, "cpus": 64, "at_most": 1})
    alone = changed(RATES, allreduce_s=10.0)
    plan = Planner(cat, alone).plan(Budget(1.0, "")).plan
    assert plan.learners == {"a": 1}
    assert Planner(cat, RATES).plan(Budget(1.0, "")).plan.learners["a"] > 1
    with pytest.raises(ConfigError, match=r"stay below 410, however many"):
        Planner(cat, alone).plan(Target(1e6, 1))


@pytest.mark.parametrize("allreduce_s", [0.0, 1e-3])
def test_there_are_no_more_learners_than_gain_anything(allreduce_s):
    cat = kinds(a={"price_per_h": 1.0, "cpus": 64, "at_most": 1})
    rates = changed(RATES, max_learners=1, allreduce_s=allreduce_s)
    plan = Planner(cat, rates).plan(Budget(1.0, "")).plan
    assert plan.learners == {"a": 1}
    assert plan.learning_env_steps_per_s == RATES.learner_env_steps_per_s
    with pytest.raises(
        ConfigError, match=r"(?s)learning is the limit.*More learners would gain nothing"
    ):
        Planner(cat, rates).plan(Target(1e6, 1))
    with pytest.raises(ConfigError, match="asks for 8 GPUs with a learner each, but more than 1"):
        Planner(cat, rates).plan(Need(8, 0))


@pytest.mark.more
def test_plan_with_hundreds_of_machines():
    """No end of tangents, and no end of branches: the time limit of a test holds it."""
    cat = read_catalogue()
    answer = Planner(cat, changed(RATES, allreduce_s=0.001)).plan(Target(2e9, 3600))
    assert answer.plan.env_steps_per_s == pytest.approx(2e9 / 3600, rel=0.01)
    assert answer.plan.solver_gap < 1e-3


@pytest.mark.parametrize(
    ("worker_cores", "share"),
    [(0.0, 8), (0.1, 8), (0.2, 4), (0.3, 3), (0.9, 1), (1.0, 1), (2, 0.5)],
)
def test_workers_share_core_up_to_its_load_limit(worker_cores, share):
    assert changed(RATES, worker_cores=worker_cores).workers_per_core == share


def test_goals_are_parsed_in_all_spellings():
    assert parse_target("20M env_steps in 1h") == Target(20e6, 3600)
    assert parse_target(" 20_000_000 env steps in 60 min") == Target(20e6, 3600)
    assert parse_target("1.5B steps in 2 days") == Target(1.5e9, 2 * 86400)
    assert parse_target("3,000k env_steps in 90s") == Target(3e6, 90)
    assert parse_target("2e7 env_steps in 1h") == Target(20e6, 3600)
    assert parse_target("5000 env_steps in h") == Target(5000, 3600)
    assert parse_budget("5 USD/h") == Budget(5.0, "USD")
    assert parse_budget("0.5 eur per hour") == Budget(0.5, "EUR")
    assert parse_budget("12/h") == Budget(12.0, "")
    assert parse_need("8 gpus 64 cpus") == parse_need("64 CPUs and 8 GPUs") == Need(8, 64)
    assert parse_need("1 gpu") == Need(1, 0)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_target, "20M env_steps"),
        (parse_target, "20M in 1h"),
        (parse_target, "20X env_steps in 1h"),
        (parse_target, "0 env_steps in 1h"),
        (parse_target, "5 env_steps in 0 s"),
        (parse_target, "5 env_steps in 3 weeks"),
        (parse_budget, "5 USD"),
        (parse_budget, "much"),
        (parse_budget, "0 USD/h"),
        (parse_need, "8 tpus"),
        (parse_need, "8 gpus 2 tpus"),
        (parse_need, "8 gpus 4 gpus"),
        (parse_need, "0 gpus"),
    ],
)
def test_unreadable_goal_error_shows_example(parse, text):
    with pytest.raises(ConfigError, match=r"Example: --") as refused:
        parse(text)
    assert repr(text) in str(refused.value)


def test_plan_with_example_prices_begins_with_warning():
    cat = read_catalogue()
    assert cat.is_example and cat.date == "2026-11-23" and "not checked" in cat.source
    said = make_plan([Need(1, 8)], cat).describe()
    assert said.startswith("THE PRICES ARE AN EXAMPLE") and cat.source in said and cat.date in said
    own = parse_catalogue(TABLE | {"machines": {"a": SMALL}}, "m.toml")
    assert "EXAMPLE" not in make_plan([Need(1, 0)], own).describe()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"currencies": "USD"}, "no key 'currencies' in m.toml. Did you mean currency"),
        ({"date": None}, "date is missing in m.toml: expected date, source, currency"),
        ({"machines": {}}, "m.toml has no machines"),
        ({"machines": {"a": 3}}, "machines.a in m.toml is 3: expected a table"),
        ({"cpus_per_learner": -1}, "cpus_per_learner=-1 (m.toml): expected at least 0"),
        ({"is_example": 1}, "is_example=1 (m.toml): expected bool"),
        ({"source": " "}, "source is missing in m.toml"),
        ({"a": {"price": 1.0}}, "no key 'price' in machines.a in m.toml. Did you mean price_per_h"),
        ({"a": {"price_per_h": None}}, "price_per_h is missing in machines.a in m.toml"),
        ({"a": {"price_per_h": "1"}}, "price_per_h='1' (machines.a in m.toml): expected float"),
        ({"a": {"price_per_h": 0.0}}, "no number of them is too many"),
        ({"a": {"cpus": 2.5}}, "cpus=2.5 (machines.a in m.toml): expected int"),
        ({"a": {"gpus": True}}, "gpus=True (machines.a in m.toml): expected int"),
        ({"a": {"cpu_speed": 0}}, "cpu_speed=0 (machines.a in m.toml): expected a number above"),
        ({"a": {"learner_speed": math.inf}}, "learner_speed=inf"),
    ],
)
def test_invalid_catalogue_is_refused(change, words):
    given = TABLE | {"machines": {"a": SMALL | change.pop("a", {})}} | change
    given = {key: value for key, value in given.items() if value is not None}
    for of in given["machines"].values():
        if isinstance(of, dict):
            of.update({key: of[key] for key in list(of)})
            for key in [key for key, value in of.items() if value is None]:
                del of[key]
    with pytest.raises(ConfigError) as refused:
        parse_catalogue(given, "m.toml")
    assert words in str(refused.value)


def test_profile_without_workers_is_refused():
    with pytest.raises(ConfigError, match="stepped where the learner is"):
        Rates.from_json({"rates": None}, "P.json")


def test_old_profile_with_samplers_is_read():
    old = {name.replace("worker_", "sampler_"): value for name, value in vars(RATES).items()}
    old["envs_per_worker"] = old.pop("envs_per_sampler", RATES.envs_per_worker)
    assert "sampler_cores" in old
    assert Rates.from_json({"rates": old}, "P.json") == RATES
    del old["max_learners"]
    assert Rates.from_json({"rates": old}, "P.json") == RATES


def test_all_keys_of_machine_are_read():
    of = SMALL | {"memory_gib": 16, "cpu_speed": 0.5, "at_most": 3, "note": "ours"}
    assert set(of) == names(MachineKind) - {"name", "spot", "is_spot"}
    (kind,) = parse_catalogue(TABLE | {"machines": {"a": of}}, "m.toml").kinds
    assert {name: getattr(kind, name) for name in of} == of
    assert kind.hardware == "4 CPUs, 1 GPU, 16 GiB"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "The rates in P.json lack worker_env_steps_per_s, worker_cores"),
        ({"lag": None}, "The rates in P.json lack lag"),
        ({"batch": 1.5}, "batch=1.5 (rates in P.json): expected int"),
        (
            {"worker_env_steps_per_s": 0},
            "worker_env_steps_per_s=0 (rates in P.json): expected a number above 0",
        ),
        ({"allreduce_s": -1.0}, "allreduce_s=-1.0 (rates in P.json): expected at least 0"),
        ({"env": 3}, "env=3 (rates in P.json): expected str"),
    ],
)
def test_profile_with_invalid_rates_is_refused(change, words):
    rates = vars(RATES) | (change or {})
    rates = {name: value for name, value in rates.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        Rates.from_json({"rates": rates} if change is not None else {}, "P.json")
    assert words in str(refused.value)


def test_impossible_goals_are_refused():
    cat = kinds(gpu={"price_per_h": 1.0, "cpus": 4, "gpus": 1})
    need, target, budget = Need(1, 1), Target(1e6, 3600), Budget(5.0, "USD")
    for goals, given in (([], "none"), ([need, target], "2")):
        with pytest.raises(ConfigError, match=f"Expected one of --target.*, and got {given}"):
            make_plan(goals, cat, RATES)
    for goal in (target, budget):
        with pytest.raises(ConfigError, match="needs --profile"):
            make_plan([goal], cat)
    with pytest.raises(ConfigError, match=r"Profile on one, or put learner_speed into .*gpu"):
        make_plan([target], cat, RATES)
    on_gpu = changed(RATES, learner_device="NVIDIA T4")
    assert make_plan([target], cat, on_gpu).plan.machines == {"gpu": 1}
    with pytest.raises(ConfigError, match="The budget is in EUR, but the prices are in USD"):
        make_plan([Budget(5.0, "EUR")], cat, on_gpu)
    with pytest.raises(ConfigError, match=r"0.5 USD/h is too small: .* cost 1 \(1 x gpu\)"):
        make_plan([Budget(0.5, "")], cat, on_gpu)
    cpus = kinds(cpu={"price_per_h": 1.0, "cpus": 4})
    for goal in (target, budget):
        with pytest.raises(ConfigError, match="no machine here for a learner and workers"):
            make_plan([goal], cpus, on_gpu)


def test_unreachable_target_error_names_reachable_rate_and_limit():
    few = {"price_per_h": 1.0, "cpus": 5, "gpus": 1, "learner_speed": 1.0, "at_most": 2}
    at_most = kinds(gpu=few, cpu={"price_per_h": 0.5, "cpus": 8})
    nonstop = changed(RATES, lag=2, learner_device="NVIDIA T4")
    with pytest.raises(ConfigError) as refused:
        make_plan([Target(10_000, 1)], at_most, nonstop)
    said = str(refused.value)
    assert "needs 10,000 env steps/s. These machines reach 6,000 at most" in said
    assert "learning is the limit" in said and "at_most of gpu" in said


def test_cpu_learners_are_not_mixed_with_gpu_learners():
    cat = kinds(
        cpu={"price_per_h": 1.0, "cpus": 8, "at_most": 1},
        gpu={"price_per_h": 1.0, "cpus": 8, "gpus": 1, "learner_speed": 9.0, "at_most": 1},
    )
    plan = make_plan([Budget(2.0, "")], cat, RATES).plan
    assert plan.machines == {"cpu": 1, "gpu": 1}
    assert plan.learners == {"gpu": 1}


# The command.


def headrace(*args, cwd):
    return python.run(
        python.command(*args),
        cwd=cwd, timeout=110,
    )  # fmt: skip


MACHINES = """
date = 2026-11-23
source = "our own list"
currency = "EUR"
[machines.small]
price_per_h = 0.3
cpus = 8
[machines.big]
price_per_h = 1.3
cpus = 32
at_most = 2
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "P.json").write_text(json.dumps({"rates": vars(RATES)}))
    (tmp_path / "machines.toml").write_text(MACHINES)
    return tmp_path


def test_command_prints_plan(files):
    flags = ["--profile", "P.json", "--machines", "machines.toml"]
    done = headrace("plan", *flags, "--target", "20M env_steps in 1h", "--json", cwd=files)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plan = found["plan"]
    assert plan["env_steps_per_s"] >= 20e6 / 3600
    assert plan["hours"] == pytest.approx(20e6 / 3600 / plan["env_steps_per_s"])
    assert plan["cost"] == pytest.approx(plan["hours"] * plan["cost_per_h"])
    prices = {"small": 0.3, "big": 1.3}
    assert plan["cost_per_h"] == pytest.approx(
        sum(prices[name] * n for name, n in plan["machines"].items())
    )
    assert plan["limit"] in ("sampling", "learning")
    assert found["catalogue"]["currency"] == "EUR" and found["rates"] == vars(RATES)
    assert found["runner_up"] in found["without"]
    said = headrace("plan", *flags, "--budget", "3 EUR/h", cwd=files)
    assert said.returncode == 0, said.stderr
    assert "EXAMPLE" not in said.stdout and "our own list; 2026-11-23" in said.stdout
    assert "The limit is" in said.stdout and "runner-up" in said.stdout
    assert "To start it: headrace train CartPole-v1 --algo ppo" in said.stdout


def test_command_uses_example_catalogue_by_default(files):
    done = headrace("plan", "--need", "8 gpus 64 cpus", "--one-learner-kind", cwd=files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("THE PRICES ARE AN EXAMPLE")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Expected one of --target"),
        (("--target", "1M steps in 1h", "--budget", "5/h"), "and got 2"),
        (("--target", "soon"), 'Example: --target "20M env_steps in 1h"'),
        (("--target", "1M steps in 1h"), "needs --profile"),
        (("--need", "1 gpu", "--profile", "none.json"), "none.json cannot be read: No such file"),
        (("--need", "1 gpu", "--machines", "none.toml"), "none.toml cannot be read: No such file"),
        (("--need", "1 gpu", "--machines", "P.json"), "P.json is no TOML file"),
        (("--need", "1 gpu", "--profile", "machines.toml"), "machines.toml is no JSON"),
    ],
)
def test_command_refuses_invalid_flags(files, flags, words, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert _main(["plan", *flags]) == 2
    assert words in capsys.readouterr().err


def test_printed_training_command_is_valid():
    cat = kinds(a={"price_per_h": 1.0, "cpus": 8})
    for rates in (changed(RATES, lag=2, allreduce_s=0.01), changed(RATES, worker_cores=1.0)):
        plan = make_plan([Target(2e8, 3600)], cat, rates).plan
        program, verb, *argv = plan.command(rates, 1).split()
        assert (program, verb) == ("headrace", "train")
        flags = parse("train", "", FLAGS["train"], argv)
        run = RunConfig(**explicit(argv, flags))
        assert (run.env, run.algo, run.cluster) == ("CartPole-v1", "ppo", "auto")
        assert run.num_learners == sum(plan.learners.values()) > 1
        assert run.num_workers % run.num_learners == 0
        assert 0 <= sum(plan.workers.values()) - run.num_workers < run.num_learners
        assert run.cpus_per_worker == pytest.approx(1 / rates.workers_per_core)
        assert run.lag == (rates.lag or -1)


def test_missing_scipy_error_names_extra(tmp_path):
    code = (
        "import sys; sys.modules['scipy.optimize'] = None; from headrace.cli.main import main;"
        "main(['plan', '--need', '1 gpu'])"
    )
    done = python.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 2
    assert install_command("plan") in done.stderr and "Traceback" not in done.stderr
