"""Parts of updates that are CUDA graphs on a GPU (`tests/test_gpu.py`), here without the graphs."""

import gc
import weakref

import pytest
import torch

from headrace.config.resolve import resolve
from headrace.learner import recorded
from headrace.learner.learner import PolicyLearner
from headrace.learner.recorded import Recorded
from tests.support import (
    RAINBOW,
    REPLAY,
    inline,
    learner_for,
    plan_for,
    policies_for,
    short_cartpole,
)

CPU = torch.device("cpu")


@pytest.fixture
def without_graphs(monkeypatch):
    """What a graph would replay is called."""
    monkeypatch.setattr(recorded, "CudaGraph", lambda function, device: function)


@pytest.mark.parametrize("parts", [{}, RAINBOW, {"priority_alpha": 0.6, "normalize_reward": True}])
def test_recorded_parts_of_updates_depend_on_their_arguments_alone(
    without_graphs, monkeypatch, parts
):
    """Over updates whose learning rate, weights of priorities and gradient steps differ."""
    plan = plan_for(short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    fragments = collector.collect().fragments
    collector.close()
    given = REPLAY | {"lr_schedule": "linear", "schedule_env_steps": 1000, "num_workers": 0}
    given |= {"arithmetic": "plain"}  # autograd, as on a GPU
    settings = resolve(given | parts)
    found = []
    for is_recorded in (False, True):
        monkeypatch.setattr(PolicyLearner, "_can_be_recorded", is_recorded)
        learner = learner_for(settings, plan.spec, device="cpu")
        metrics = [learner.update(learner.assemble(fragments), 128 * i, 128) for i in range(4)]
        found.append((metrics, learner.policies["default"].state_dict()))
        graphs = learner.learners["default"]._graphs
        assert all(len(graph._layouts) == 1 for graph in graphs.values())
    expected = {"step of policy"}
    expected |= {"draw", "priorities"} if "priority_alpha" in parts else set()
    assert set(graphs) == expected | ({"noise"} if "noisy" in parts else set())
    # Learning rate and weights of priorities are float32 there.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_what_a_recorded_function_uses_is_freed_with_it():
    class Memory:
        pass

    memory = Memory()
    function = Recorded(lambda of, kept=memory: {"x": of["x"] + 1}, CPU)
    for _ in range(2):  # the second call is that of a graph, and still an ordinary one
        function({"x": torch.ones(3)})
    assert len(function._layouts) == 1
    used = weakref.ref(memory)
    gc.disable()
    try:
        del memory, function
        assert used() is None
    finally:
        gc.enable()


def test_four_layouts_are_recorded_and_large_ones_are_not(without_graphs):
    done = []

    def double(of):
        done.append(of)
        return {"x": {"y": of["x"]["y"] * of["factor"]}, "sum": of["x"]["y"].sum()}

    twice = Recorded(double, CPU)
    for size in (3, 5, 3, 5, 2**23, 2**23, 6, 7, 8):
        results = [twice({"x": {"y": torch.full((size,), v)}, "factor": 2}) for v in (1.0, 4.0)]
        assert [result["x"]["y"].unique().tolist() for result in results] == [[2.0], [8.0]]
        assert [float(result["sum"]) for result in results] == [size, 4.0 * size]
    assert len(twice._layouts) == 4
    memory = {id(of["x"]["y"]) for of in done if isinstance(of["factor"], torch.Tensor)}
    assert len(memory) == 4
    assert Recorded(lambda of: {}, CPU)({"step": 1}) == {}
