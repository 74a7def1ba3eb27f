"""Losses of ranks at any moment, in any order, over the real protocol: nobody waits for ever."""

import pytest

from tests.distributed.simulated_ranks import ENV_STEPS, STEPS_OF_UPDATE, World


def expected_weights(updates):
    weights = 0
    for update in range(updates):
        for step in range(STEPS_OF_UPDATE):
            weights = hash((weights, update, step))
    return weights


def check(seed, size, updates, losses):
    """Run a schedule; return whether all ranks came to the end of the run together."""
    world = World(seed, size, updates, losses)
    world.run()
    if world.begins_again:  # from a checkpoint: all were lost, or one before they had met
        assert set(world.killed) == set(range(size)) or len(world.groups[0].rounds) <= 2
        return False
    # It may have been cut off right after its last word to the others.
    given_up = [task.result for task in world.given_up if isinstance(task.result, BaseException)]
    assert all("has its place" in str(error) for error in given_up), given_up
    results = [task.result for task in world.tasks.values() if task.result]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    learners, counters, _ = zip(*results, strict=True)
    assert {learner.version for learner in learners} == {updates}
    assert {learner.weights for learner in learners} == {expected_weights(updates)}
    for each in counters:
        ledger = each.ledger
        assert each.env_steps == updates * size * ENV_STEPS
        assert ledger.collected == each.env_steps + ledger.lost
        # One that is lost before it has joined the others is replaced, and not counted. One that
        # has to join twice, since another is lost meanwhile, is counted twice.
        if len(results) == size:
            assert len(set(world.killed)) <= ledger.restarts
        assert ledger.restarts <= 2 * len(world.killed)
        assert ledger.lost <= len(world.killed) * ENV_STEPS
    return len(results) == size


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_ranks_that_are_lost_at_any_moment(count):
    whole = 0
    for seed in range(count):
        try:
            whole += check(seed, size=2 + seed % 3, updates=4, losses=seed % 4)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert whole > 0.8 * count


@pytest.mark.more
def test_ledgers_of_a_thousand_workers_and_64_learners_balance():
    """Learners are killed at any moment, and workers lose fragments."""
    size, workers, updates = 64, 16, 4
    world = World(1, size, updates, losses=8, workers=workers)
    world.may_kill_early, world.kill_rate = False, 0.001  # all through the run
    world.run()
    results = [task.result for task in world.tasks.values()]
    assert not [each for each in results if isinstance(each, BaseException)]
    learners, counters, collectors = zip(*results, strict=True)
    assert world.killed
    assert {learner.weights for learner in learners} == {expected_weights(updates)}
    assert sum(collector.ledger.remade for collector in collectors) > 0
    for each in counters:
        ledger = each.ledger
        assert each.env_steps == updates * size * workers * ENV_STEPS
        assert ledger.collected == each.env_steps + ledger.lost + ledger.remade
        assert ledger.lost <= len(world.killed) * workers * ENV_STEPS
