"""The workers' state in vectors of another size."""

import numpy as np
import pytest

from headrace.collectors.snapshots import regroup

NUM_ENVS = 8


def state(envs_per_vector, without=()):
    """As workers save it: columns of a vector, arrays of one environment, and what is neither."""
    made = {"round": np.array(7)}
    for v in range(NUM_ENVS // envs_per_vector):
        envs = range(v * envs_per_vector, (v + 1) * envs_per_vector)
        if set(envs) & set(without):
            continue
        made[f"vector{v}.episode"] = np.array([10 * env for env in envs])
        made[f"vector{v}.noise"] = np.array([[env, env + 0.5] for env in envs], np.float32)
        for i, env in enumerate(envs):
            if env % 3:  # not every environment has as much
                made[f"vector{v}.env{i}.actions"] = np.arange(env)
                made[f"vector{v}.env{i}.state.x"] = np.full((2, 2), env)
    return made


def same(a, b):
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert array.dtype == b[name].dtype, name
        np.testing.assert_array_equal(array, b[name])


@pytest.mark.parametrize("now", [1, 2, 4, 8])
@pytest.mark.parametrize("before", [1, 2, 4, 8])
def test_regrouped_environments_keep_their_states(before, now):
    same(regroup(state(before), NUM_ENVS, now), state(now))


def test_regrouped_vector_without_one_environment_s_state_has_none():
    found = regroup(state(2, without=(2,)), NUM_ENVS, 4)
    same(found, state(4, without=(2,)))
    assert "vector0.episode" not in found and "vector1.episode" in found
