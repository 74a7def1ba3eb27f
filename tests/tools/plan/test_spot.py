"""Tests of plans with spot machines: the simulation against formulas, choices, errors."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from benchmarks import plan as benchmark
from headrace.cli.main import _main
from headrace.errors import ConfigError
from headrace.tools.plan.goals import Budget, Need, Target
from headrace.tools.plan.losses import (
    ON_CPUS,
    ROLLBACK,
    Recovery,
    checkpoint_interval_s,
    draw_losses,
    simulate_losses,
)
from headrace.tools.plan.machines import Catalogue, MachineKind, SpotTerms, parse_catalogue
from headrace.tools.plan.planner import Planner
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.result import MachinePlan
from headrace.tools.plan.spot import WITHOUT, make_plan

RATES = Rates(250.0, 0.2, 5000.0, "a GPU", 1, 4096, "CartPole-v1", "appo", 0.0, 1, 1)
NEVER = 1e9


def kind(name, cpus, gpus=0, hours=2.0, minutes=6.0):
    return MachineKind(
        name, 1.0, cpus, gpus, spot=SpotTerms(name, 0.3, hours, minutes), is_spot=True
    )


def plan_of(*counts):
    """A plan of (kind, machines, learners)."""
    return MachinePlan(
        kinds=tuple(each for each, _, _ in counts),
        machines={each.name: machines for each, machines, _ in counts},
        learners={each.name: learners for each, _, learners in counts if learners},
        worker_cores={each.name: each.cpus * machines for each, machines, _ in counts},
        cost_per_h=0.0,
    )


def left_of(*counts, every_s=60.0, save_s=1e-9, recovery=None, hours=20_000.0, rates=RATES):
    plan = plan_of(*counts)
    return simulate_losses(plan, rates, every_s, save_s, recovery, hours=hours, most_losses=30_000)


def test_workers_are_missing_while_they_are_replaced():
    found = left_of((kind("gpu", 4, 1, hours=NEVER), 1, 1), (kind("cpu", 8), 10, 0))
    away = 6 / (120 + 6)
    assert found.share == pytest.approx(1 - away * 80 / 84, rel=0.005)
    assert found.losses_per_h == pytest.approx(10 / 2 * (1 - away), rel=0.02)
    assert (found.learner_losses_per_h, found.again, found.standing) == (0, 0, 0)


def test_a_batch_that_needs_all_workers_waits_for_the_most_loaded_core():
    """A machine's workers share the cores of the others: two of four have three on two cores."""
    away, recovery = 6 / (120 + 6), replace(ROLLBACK, workers_s=36.0)
    steady = kind("gpu", 0, 1, hours=NEVER), 1, 1
    for cores, machines, share in ((1, 4, 1 / 2), (2, 4, 2 / 3), (4, 4, 4 / 6), (8, 9, 8 / 9)):
        each = kind("cpu", cores, hours=200.0, minutes=600.0), machines, 0
        found = left_of(steady, each, rates=None, hours=200_000.0, recovery=ROLLBACK)
        nobody = (200 / 210) ** machines
        one = machines * (200 / 210) ** (machines - 1) * 10 / 210
        assert nobody + one * share < found.share < nobody + one * share + 1 - nobody - one
    one = kind("cpu", 8), 1, 0  # then there is none left
    found = left_of(steady, one, rates=None, recovery=recovery)
    assert found.share == pytest.approx(1 - away, rel=0.01)
    assert found.standing == pytest.approx(found.losses_per_h * 36 / 3600, rel=0.01)
    assert left_of(steady, one, recovery=recovery).standing == 0  # where nobody waits


def test_learners_stand_still_until_there_is_room_and_they_have_begun_again():
    recovery = replace(ROLLBACK, notice_s=0.0, restart_s=120.0)
    found = left_of((kind("gpu", 4, 1), 1, 1), recovery=recovery, every_s=1e-3)
    # Lost after 120 minutes on average, 6 away; of each time back, 2 are for the start.
    assert found.standing == pytest.approx(1 - 120 * math.exp(-2 / 120) / 126, rel=0.02)
    assert found.share == pytest.approx(1 - found.standing, rel=1e-3)


def test_a_spare_is_taken_at_once():
    each = kind("gpu", 4, 1)
    alone, with_spare = left_of((each, 8, 8)), left_of((each, 10, 8))
    assert with_spare.standing < alone.standing / 3
    seldom = kind("gpu", 4, 1, hours=50.0)
    found = left_of((seldom, 10, 8), hours=100_000.0)
    seconds = ROLLBACK.notice_s + ROLLBACK.restart_s
    assert found.standing == pytest.approx(8 / 50 * seconds / 3600, rel=0.05)


def test_half_of_what_lies_between_checkpoints_is_made_again():
    found = left_of((kind("gpu", 4, 1, hours=50.0), 10, 8), every_s=120.0, hours=100_000.0)
    assert found.again == pytest.approx(found.learner_losses_per_h * 60 / 3600, rel=0.05)
    kept = replace(ROLLBACK, keeps_work=True)
    assert left_of((kind("gpu", 4, 1), 10, 8), recovery=kept).again == 0


def test_learners_that_go_on_without_the_lost_one_have_more():
    goes_on = Recovery(1.0, 3.0, keeps_work=True, waits=False)
    today, then = (left_of((kind("gpu", 4, 1), 8, 8), recovery=r) for r in (ROLLBACK, goes_on))
    assert today.share < then.share - 0.1
    assert then.standing < 0.01


def test_a_loss_is_noticed_while_there_is_no_room():
    """All that the notice takes is then no time more; and so it is with a machine that comes."""
    alone, quick = (kind("gpu", 4, 1), 1, 1), replace(ROLLBACK, notice_s=0.0)
    assert left_of(alone, recovery=replace(quick, notice_s=300.0)) == left_of(alone, recovery=quick)
    late = left_of(alone, recovery=replace(quick, notice_s=420.0))  # replaced after 360
    assert late.standing > left_of(alone, recovery=quick).standing


def test_learners_stand_still_while_one_moves_to_a_machine_that_came():
    stays = Recovery(0.0, 0.0, keeps_work=True, waits=False)
    moves = replace(stays, move_s=72.0)
    each = kind("cpu", 8)
    found = left_of((each, 8, 64), recovery=moves)
    assert left_of((each, 8, 64), recovery=stays).standing == 0
    assert found.standing == pytest.approx(found.learner_losses_per_h * 72 / 3600, rel=0.05)
    # A spare is room at once: what comes later is a spare again.
    assert left_of((replace(each), 10, 64), recovery=moves).standing < found.standing / 3


def test_learners_on_cpus_go_on_and_a_single_one_begins_again():
    several = left_of((kind("cpu", 8), 16, 16))
    assert several.again == 0 < several.learner_losses_per_h
    assert several == left_of((kind("cpu", 8), 16, 16), recovery=ON_CPUS)
    alone = left_of((kind("cpu", 1), 1, 1))
    assert alone == left_of((kind("cpu", 1), 1, 1), recovery=ROLLBACK)
    assert alone.again > 0


def test_losses_are_drawn_in_order_and_each_machine_comes_back():
    plan = plan_of((kind("gpu", 4, 1), 2, 2), (kind("cpu", 8, minutes=30.0), 3, 0))
    changes = list(itertools.islice(draw_losses(plan), 1000))
    assert [change.at for change in changes] == sorted(change.at for change in changes)
    lost = {"gpu": [], "cpu": []}
    for at, name, comes in changes:
        if comes:
            assert at == pytest.approx(lost[name].pop(0) + 60 * {"gpu": 6, "cpu": 30}[name])
        else:
            lost[name].append(at)
            assert len(lost[name]) <= plan.machines[name]
    assert changes == list(itertools.islice(draw_losses(plan), 1000))


def test_rates_say_what_limits():
    spare_workers = Planner(
        Catalogue((kind("gpu", 4, 1, hours=NEVER), kind("cpu", 8)), "today", "me", "USD"), RATES
    ).with_rates(plan_of((kind("gpu", 4, 1, hours=NEVER), 1, 1), (kind("cpu", 8), 10, 0)))
    assert spare_workers.limit == "learning"
    found = simulate_losses(spare_workers, RATES, 60.0, 1e-9, hours=1000.0)
    assert found.share == pytest.approx(1.0)  # the others are enough
    assert found.losses_per_h > 4


def test_checkpoint_interval_is_the_best():
    plan = plan_of((kind("gpu", 4, 1), 10, 8))
    best = checkpoint_interval_s(plan, 2.0)
    assert best == pytest.approx(math.sqrt(2 * 2.0 / (8 / 7200)))

    def share(every_s):
        return simulate_losses(plan, None, every_s, 2.0, hours=10_000.0).share

    assert share(best) > max(share(best / 4), share(best * 4))
    assert checkpoint_interval_s(plan_of((kind("cpu", 4), 10, 0)), 2.0) == 600
    assert checkpoint_interval_s(plan_of((kind("cpu", 1), 1, 1)), 2.0) < 300
    assert checkpoint_interval_s(plan_of((kind("cpu", 1), 2, 2)), 2.0) == 600  # nothing is lost


GPU = MachineKind("gpu", 0.5, 4, 1, spot=SpotTerms("gpu", 0.16, 2.0))
CPU = MachineKind("cpu", 0.5, 8, spot=SpotTerms("cpu", 0.2, 2.0))
TARGET = Target(100e6, 3600)


def catalogue(*kinds):
    return Catalogue(kinds, "today", "me", "USD", cpus_per_learner=0)


def test_target_is_reached_with_losses_at_less_cost_than_without_spot():
    found = make_plan([TARGET], catalogue(GPU, CPU), RATES, spot=True)
    assert found.spot.env_steps_per_s >= 0.998 * TARGET.env_steps_per_s
    assert found.plan.env_steps_per_s > TARGET.env_steps_per_s
    assert found.plan.cost_per_h < found.without[WITHOUT].cost_per_h / 2
    assert found.spot.spares["gpu-spot"] >= 1
    text = found.describe()
    assert f"--checkpoint-every-s {found.spot.checkpoint_every_s:.0f}" in text
    assert "With losses" in text
    hours = TARGET.env_steps / found.spot.env_steps_per_s / 3600
    assert found.to_json()["plan"]["hours"] == pytest.approx(hours)


def test_faster_machines_make_up_for_lost_ones():
    steady, slow = replace(GPU, spot=None), replace(CPU, spot=SpotTerms("cpu", 0.2, 2.0, 60.0))
    target = Target(1e9, 3600)
    found = make_plan([target], catalogue(steady, slow), RATES, spot=True)
    assert found.spot.spares == {}
    assert found.spot.left.share < 0.97
    assert found.spot.env_steps_per_s >= 0.998 * target.env_steps_per_s


def test_spares_are_worth_their_price_where_replacements_take_long():
    slow = replace(GPU, spot=SpotTerms("gpu", 0.16, 5.0, 60.0))
    found = make_plan([Need(4, 0)], catalogue(slow), spot=True)
    assert found.spot.spares["gpu-spot"] >= 1
    assert found.plan.machines["gpu-spot"] == 4 + found.spot.spares["gpu-spot"]


def test_budget_includes_spares():
    slow = replace(GPU, cpus=0, spot=SpotTerms("gpu", 0.16, 5.0, 60.0))
    found = make_plan([Budget(4.0, "USD")], catalogue(slow, CPU), RATES, spot=True)
    assert found.plan.cost_per_h <= 4.001
    assert found.spot.spares["gpu-spot"] >= 1
    assert found.spot.env_steps_per_s > found.without[WITHOUT].env_steps_per_s


def test_budget_buys_the_fastest_and_not_the_cheapest_for_each_env_step():
    often = replace(GPU, cpus=8, spot=SpotTerms("gpu", 0.2, 0.15))
    found = make_plan([Budget(0.9, "USD")], catalogue(often), RATES, spot=True)
    steady = found.without[WITHOUT]
    assert found.spot.env_steps_per_s > steady.env_steps_per_s
    assert (
        found.plan.cost_per_h / found.spot.env_steps_per_s
        > steady.cost_per_h / steady.env_steps_per_s
    )


def test_learners_stay_on_machines_that_are_not_taken_away_if_that_is_cheaper():
    often = replace(GPU, spot=SpotTerms("gpu", 0.49, 0.1))
    found = make_plan([TARGET], catalogue(often, CPU), RATES, spot=True)
    assert set(found.plan.learners) == {"gpu"}
    assert "cpu-spot" in found.plan.machines
    assert found.spot.left.learner_losses_per_h == 0
    needed = make_plan([Need(4, 64)], catalogue(often, CPU), spot=True)
    assert needed.plan.learners == {"gpu": 4}
    assert "cpu-spot" in needed.plan.machines


def test_spot_machines_that_save_nothing_are_left_out():
    useless = [replace(k, spot=SpotTerms(k.name, k.price_per_h, 0.05)) for k in (GPU, CPU)]
    found = make_plan([TARGET], catalogue(*useless), RATES, spot=True)
    plain = make_plan([TARGET], catalogue(*useless), RATES)
    assert (found.plan.machines, found.spot) == (plain.plan.machines, None)


def test_target_that_cannot_be_reached_says_why():
    few = [replace(k, at_most=1) for k in (GPU, CPU)]
    with pytest.raises(ConfigError, match="reach"):
        make_plan([TARGET], catalogue(*few), RATES, spot=True)


TABLE = {"date": "2026-11-23", "source": "a test", "currency": "USD"}


def parsed(spot):
    machine = {"price_per_h": 1.0, "cpus": 4, "gpus": 1, "spot": spot}
    return parse_catalogue(TABLE | {"machines": {"gpu": machine}}, "FILE")


def test_spot_terms_are_read():
    (gpu,) = parsed({"price_per_h": 0.3, "hours_between_losses": 5}).kinds
    assert gpu.spot == SpotTerms("gpu", 0.3, 5, 5.0)
    assert not gpu.is_spot


@pytest.mark.parametrize(
    ("spot", "message"),
    [
        (0.3, r"machines\.gpu\.spot in FILE is no table: expected \[machines\.gpu\.spot\]"),
        ({"price_per_h": 0.3}, r"hours_between_losses is missing in machines\.gpu\.spot"),
        ({"price_per_h": 0.3, "hours_between_losses": 0}, "hours_between_losses=0"),
        ({"price": 0.3}, r"no key 'price' in machines\.gpu\.spot in FILE. Did you mean"),
    ],
)
def test_wrong_spot_terms_are_refused(spot, message):
    with pytest.raises(ConfigError, match=message):
        parsed(spot)


def test_keys_that_are_made_here_are_no_keys_of_a_table():
    machine = {"price_per_h": 1.0, "cpus": 4, "is_spot": True}
    with pytest.raises(ConfigError, match="no key 'is_spot'"):
        parse_catalogue(TABLE | {"machines": {"cpu": machine}}, "FILE")


def test_spot_without_terms_says_what_to_write():
    bare = replace(GPU, spot=None)
    with pytest.raises(ConfigError, match=r"\[machines\.NAME\.spot\]"):
        make_plan([TARGET], catalogue(bare), RATES, spot=True)


def test_command_with_spot_machines(tmp_path, capsys):
    file = tmp_path / "machines.toml"
    file.write_text(
        'date = 2026-11-29\nsource = "a test"\ncurrency = "USD"\n[machines.gpu]\nprice_per_h = 1\n'
        "cpus = 4\ngpus = 1\n[machines.gpu.spot]\nprice_per_h = 0.3\nhours_between_losses = 3\n"
    )
    _main(["plan", "--machines", str(file), "--need", "4 gpus", "--spot", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["machines"]["gpu-spot"] >= 4
    assert 0.5 < found["spot"]["left"]["share"] < 1


def test_published_case_with_losses():
    found, _ = benchmark.result()
    today, others_go_on = found["with_losses"]
    assert 0.5 < today["share"] < others_go_on["share"] - 0.1 < 0.9
    assert today["again"] > others_go_on["again"] == 0
