"""When a run is saved, and what goes into a checkpoint. Left out: how it is written."""

import copy
import time
from dataclasses import asdict

import headrace
from headrace.batch import Fragment, named
from headrace.collectors.api import ShouldStop
from headrace.distributed.ranks import Ranks, gather_json
from headrace.errors import RunDirError
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.learner.learner import Learns
from headrace.storage import checkpoint
from headrace.storage.files import Obstacle, write_whole
from headrace.storage.sections import Section, SectionState
from headrace.training.job import Job
from headrace.training.loop import Counters


class Saver:
    """Writes checkpoints of the parts."""

    def __init__(
        self,
        task: Job,
        sections: list[Section],
        counters: Counters,
        learner: Learns,
        ranks: Ranks,
    ) -> None:
        self._task, self._settings, self._ranks = task, task.settings, ranks
        self._sections, self._counters, self._learner = sections, counters, learner
        self._saved_at = time.monotonic()
        run_dir = task.run_dir
        self._obstacle = Obstacle("Checkpoints", run_dir / "checkpoints")
        self._best_obstacle = Obstacle("Best policies", run_dir / "best")
        self._saved_version = -1 if task.saved is None else learner.version

    def is_due(self) -> bool:
        """Whether `checkpoint_every_s` have passed."""
        return time.monotonic() - self._saved_at >= self._settings.run.checkpoint_every_s

    def __call__(self) -> None:
        """Write one, unless nothing was learned since the last; called on all ranks at once."""
        if self._learner.version == self._saved_version:
            return
        states = {section.name: section.state() for section in self._sections}
        self._saved_at = time.monotonic()
        with self._obstacle.passed_over():
            if self._ranks.rank == 0:
                self._write("checkpoints", states)
        # All must know: they come here together the next time, or none does.
        if gather_json(self._ranks, self._obstacle.error is None)[0]:
            self._saved_version = self._learner.version

    def best(self) -> bool:
        """Keep the policy as it is now as the best one, in place of the one before; if it can."""
        with self._best_obstacle.passed_over():
            alone = [section for section in self._sections if not section.is_collective]
            self._write("best", {section.name: section.state() for section in alone})
        return self._best_obstacle.error is None

    def require(self) -> None:
        """At the end of a run: RunDirError if its last checkpoint could not be written."""
        if (error := self._obstacle.error) is not None:
            run_dir = self._task.run_dir
            raise RunDirError(
                f"The run has ended, and its last checkpoint could not be written to {run_dir}: "
                f"{error.strerror or error}.\nWhat was learned since the one before is lost. Make "
                f"room, and go on from there: headrace resume {run_dir}"
            )

    def write_down(self, experience: Fragment) -> str:
        """Keep the batch of an update that was not finite; where it is, in words.

        Called on all ranks at once. Each whose share has NaN or infinity in it writes it down; if
        none has, the numbers broke in the arithmetic, and all do.
        """
        tensors = {name: tensor.cpu() for name, tensor in named(experience).items()}
        rank, size = self._ranks.rank, self._ranks.size
        finite = [all(bool(t.isfinite().all()) for t in tensors.values())]
        told = [each[0] for each in gather_json(self._ranks, finite)]
        name = f"bad_batch_step_{self._counters.env_steps:012d}"
        name += f"_rank{rank}.safetensors" if size > 1 else ".safetensors"
        path, said = self._task.run_dir / name, ""
        if not told[rank] or all(told):
            said = f"The batch is in {path}"
            try:
                write_whole(path, checkpoint.to_safetensors(tensors))
            except OSError as error:
                said = f"The batch could not be written to {path}: {error.strerror or error}"
        said = "\n".join(filter(None, gather_json(self._ranks, said)))
        return (
            f"{said}\nThe least and the greatest of each of its arrays: python -c "
            "'import sys, safetensors.torch as s; [print(k, *(m.item() for m in "
            "v.double().aminmax())) for k, v in s.load_file(sys.argv[1]).items() if v.numel()]' "
            "FILE"
        )

    def _write(self, where: str, states: dict[str, SectionState]) -> None:
        manifest = {
            "headrace": headrace.__version__,
            **{name: data for name, (_, data) in states.items() if data},
            # No generator has a state: all random numbers follow from the seed and the counters.
            "seed": self._settings.run.seed,
            "policies": {
                name: {
                    "algo": self._settings.run.algo,
                    "network": asdict(self._learner.networks[name]),
                    "model": self._settings.run.model,
                    "spec": self._task.spec.of(share).to_json(),
                    "agents": [share.first, share.first + share.size],
                }
                for name, share in self._task.shares.items()
            },
        }
        parent = self._task.run_dir / where
        files = {name: tensors for name, (tensors, _) in states.items() if tensors}
        path = checkpoint.write(parent, self._counters.env_steps, files, manifest)
        checkpoint.prune(self._settings.run.keep if where == "checkpoints" else 1, path)


# Evaluating while training, and keeping the best policy.


class Evaluations:
    """Called after each update: plays `eval_episodes` once `eval_every` env steps have passed.

    Always the same episodes, with the likeliest actions. The policy with the highest mean return
    so far is kept in `best/`.
    """

    def __init__(
        self,
        task: Job,
        counters: Counters,
        learner: Learns,
        saver: Saver,
        stop: ShouldStop,
    ) -> None:
        self._task, self._run = task, task.settings.run
        self._counters, self._learner, self._saver = counters, learner, saver
        self._stop = stop

    def __call__(self) -> dict[str, float]:
        """Metrics, if an evaluation was due and not interrupted."""
        counters, every = self._counters, self._run.eval_every
        if not every or counters.env_steps // every == counters.evaluated_at // every:
            return {}
        learner, spec, shares = self._learner, self._task.spec, self._task.shares
        policies = {
            name: TrainedPolicy(
                spec.of(shares[name]), copy.deepcopy(policy).cpu(), learner.networks[name]
            )
            for name, policy in learner.policies.items()
        }
        played = evaluate(
            policies,
            self._task.maker,
            spec=spec,
            shares=shares,
            episodes=self._run.eval_episodes,
            seed=self._run.seed,
            stop=self._stop,
        )
        if played is None:
            return {}
        counters.evaluated_at = counters.env_steps
        found = played.to_json()
        if counters.best_return is None or found["mean_return"] > counters.best_return:
            before, counters.best_return = counters.best_return, found["mean_return"]
            if not self._saver.best():  # the next that is better than what is kept will be kept
                counters.best_return = before
        return {"eval_return": found["mean_return"], "eval_length": found["mean_length"]}
