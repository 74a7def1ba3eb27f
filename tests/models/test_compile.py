"""--compile: the loss under torch.compile against the eager one, and without a compiler."""

import pytest
import torch

from headrace.config.resolve import resolve
from headrace.errors import ConfigError
from tests.support import inline, learner_for, plan_for, short_cartpole

GIVEN = {"env": "short", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4, "seed": 3}
GIVEN |= {"num_epochs": 2, "num_minibatches": 2, "lr": 1e-3, "ent_coef": 0.01}


def learn(**given):
    """Parameters and metrics after two updates, and how often the loss was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = resolve(GIVEN | given)
    plan = plan_for(
        short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4, network=settings.network
    )
    collector = inline(plan)
    learner = learner_for(settings, plan.spec)
    for _ in range(2):
        collector.publish(learner.policies, learner.version)
        metrics = learner.update(learner.assemble(collector.collect().fragments), 0)
    collector.close()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return learner.policies["default"].state_dict(), metrics, graphs


@pytest.mark.slow  # half a minute of compiling each
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in torch's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which torch itself hides
@pytest.mark.parametrize("core", ["none", "gru"])
def test_the_compiled_loss_learns_what_the_eager_one_does(core):
    eager, metrics, none = learn(arithmetic="plain", core=core)
    compiled, metrics_compiled, graphs = learn(arithmetic="plain", core=core, compile=True)
    assert none == 0
    # A core is left out: a graph before it, and one for the rest of each function around it.
    # More would be new ones for other ends of episodes.
    assert graphs == (1 if core == "none" else 4)
    for name, parameter in eager.items():
        # Adam's first steps are as long for a small gradient as for a large one: lr is 1e-3
        torch.testing.assert_close(compiled[name], parameter, rtol=1e-4, atol=1e-5)
    for name, metric in metrics.items():
        assert metrics_compiled[name] == pytest.approx(metric, rel=1e-3, abs=1e-5), name


def test_without_a_compiler_it_is_refused_in_words(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"(?s)no C\+\+ compiler.*without --compile"):
        learn(compile=True)
