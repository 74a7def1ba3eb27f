"""Rock, paper, scissors: a policy that learns against itself goes round; in a league it calms."""

import numpy as np
import pytest

import headrace
from benchmarks.games.matrix import exploitability, snapshots
from tests.leagues.support import RPS

UPDATE, UPDATES = 64 * 32, 100
SETTINGS = {
    "quiet": True, "num_envs": 64, "num_steps": 32, "num_minibatches": 4, "hidden_sizes": (16,),
    "lr": 1e-2, "ent_coef": 0.1, "snapshot_every": UPDATE, "total_env_steps": UPDATES * UPDATE,
    "num_learners": 1,
}  # fmt: skip


def mixtures(path, **settings):
    """The probabilities of the choices in each snapshot of a run, `[snapshots, 3]`."""
    run = headrace.train(RPS, run_dir=path, **SETTINGS | settings)
    found = snapshots(run.dir)
    assert len(found) == UPDATES + 1
    return found


def test_exploitability_by_hand():
    assert exploitability(np.full(3, 1 / 3)) == 0.0
    assert exploitability(np.array([1.0, 0.0, 0.0])) == 1.0  # paper wins always
    assert exploitability(np.array([0.5, 0.5, 0.0])) == 0.5  # paper: wins half, ties half
    assert exploitability(np.array([0.4, 0.3, 0.3])) == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_self_play_goes_round_and_a_league_of_eight_comes_to_the_equilibrium(tmp_path, seed):
    # Snapshots of self-play alone: nobody is ever met (test_opponents shows that it is the same)
    alone = mixtures(tmp_path / "alone", seed=seed, league=1, latest_ratio=1.0)
    league = mixtures(tmp_path / "league", seed=seed, league=8, latest_ratio=0.25)
    last = UPDATES // 4
    of_alone, of_league = (
        [exploitability(mixture) for mixture in of[-last:]] for of in (alone, league)
    )
    away = np.abs(alone[-last:] - 1 / 3).max(1)
    assert away.mean() > 0.3
    assert len({int(mixture.argmax()) for mixture in alone[-2 * last :]}) == 3  # round and round
    average = league.mean(0)
    assert np.abs(average - 1 / 3).max() < 0.05
    assert exploitability(average) < 0.07
    # And each single policy is safer to play
    assert np.mean(of_alone) > 0.5
    assert np.mean(of_league) < 0.6 * np.mean(of_alone)
