"""Saved parts of a run: checkpoints, its best policy, and a batch that was not finite."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import headrace
from headrace.batch import Fragment, named_tensors
from headrace.distributed.ranks import Ranks, gather_json
from headrace.errors import NonFiniteError, RunDirError
from headrace.learner.learner import Learner
from headrace.storage import checkpoint
from headrace.storage.checkpoint import Section, SectionState, module_section
from headrace.storage.files import RetriedWrite, write_whole
from headrace.storage.row_log import RowLog
from headrace.training.counters import Counters
from headrace.training.job import Job
from headrace.training.log import MetricsLog


class Saver:
    """Writes checkpoints, and the best policy. A disk that is full does not end the run.

    Args:
        saved_version: of a successor: as the others have it; None: that of the checkpoint.

    Attributes:
        saved_version: of the weights in the newest checkpoint; -1: there is none.
        log: the run's metrics, whose rows are in their file before a checkpoint is.
    """

    log: MetricsLog | None = None

    def __init__(
        self,
        job: Job,
        sections: list[Section],
        counters: Counters,
        learner: Learner,
        ranks: Ranks,
        saved_version: int | None = None,
    ) -> None:
        self._job, self._run, self._ranks = job, job.settings.run, ranks
        self._sections, self._counters, self._learner = sections, counters, learner
        self._saved_at = time.monotonic()
        self._writing = RetriedWrite("Checkpoints", job.run_dir / "checkpoints")
        self._best_writing = RetriedWrite("Best policies", job.run_dir / "best")
        if saved_version is None:
            saved_version = -1 if job.saved is None else learner.version
        self.saved_version = saved_version
        folder = job.run_dir / "checkpoints"
        saved = job.saved
        if ranks.is_successor and ranks.rank == 0 and any(folder.glob("step_*")):
            saved = checkpoint.newest(job.run_dir)
        saved_rows = {} if saved is None else saved.manifest.get("rows", {})
        for mark in folder.glob(".alone_*") if ranks.rank == 0 else ():
            mark.rmdir()  # of a process that was killed: see `save_alone`
        self._row_logs = {
            section.name: RowLog(
                folder, section.name, section.rows, saved_rows.get(section.name, [])
            )
            for section in sections
            if section.rows is not None
        }

    def is_due(self) -> bool:
        """Return whether `checkpoint_every_s` have passed since the last save."""
        return time.monotonic() - self._saved_at >= self._run.checkpoint_every_s

    def save(self) -> None:
        """Write a checkpoint unless these weights have one; called on all ranks at once."""
        if self._learner.version == self.saved_version:
            return
        if self.log is not None:
            self.log.flush()
        states = {section.name: section.state() for section in self._sections}
        new = {name: log.collect(self._ranks) for name, log in self._row_logs.items()}
        self._saved_at = time.monotonic()
        entries: dict[str, list[dict[str, Any]]] = {name: [] for name in new}
        with self._writing.attempt():
            if self._ranks.rank == 0:
                steps = self._counters.env_steps
                for name, (files, least) in new.items():
                    entries[name] = self._row_logs[name].write(files, least, steps)
                self._write("checkpoints", states, steps, self._run.keep, entries)
        # All ranks must know whether it was written: they try again together.
        if gather_json(self._ranks, self._writing.error is None)[0]:
            self.saved_version = self._learner.version
            for name, log in self._row_logs.items():
                log.mark_saved(entries[name])

    def save_alone(self) -> bool:
        """Write a checkpoint of what this rank has, since others are lost. Return whether it did.

        The others' episodes begin anew. Only one of the ranks that are left writes. Not with a
        replay, of which each rank has its rows; nor if these weights have a checkpoint, or are not
        finite.
        """
        parameters = (p for policy in self._learner.policies.values() for p in policy.parameters())
        if self._row_logs or self._learner.version == self.saved_version:
            return False
        if not all(bool(parameter.isfinite().all()) for parameter in parameters):
            return False
        folder, steps = self._job.run_dir / "checkpoints", self._counters.env_steps
        with self._writing.attempt():
            folder.mkdir(mode=0o700, exist_ok=True)
            mark = folder / f".alone_{steps}"
            try:
                mark.mkdir()
            except FileExistsError:  # another rank writes
                return False
            if (folder / f"step_{steps:012d}").exists():  # it has written
                mark.rmdir()
                return False
            try:
                states = {section.name: section.state() for section in self._sections}
                self._write("checkpoints", states, steps, self._run.keep)
            finally:
                mark.rmdir()
        return self._writing.error is None

    def contents(
        self, states: Mapping[str, SectionState]
    ) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """Return what a checkpoint of these sections has: files of named tensors, and manifest."""
        manifest = {
            "headrace": headrace.__version__,
            **self._imported(),
            **{name: data for name, (_, data) in states.items() if data},
            # No generator has a state: all random numbers follow from the seed and the counters.
            "seed": self._run.seed,
            "policies": describe_policies(self._job, self._learner),
        }
        return {name: tensors for name, (tensors, _) in states.items() if tensors}, manifest

    def _imported(self) -> dict[str, Any]:
        """Return from where the run was imported, as the checkpoint says it goes on from."""
        saved = self._job.saved
        imported = None if saved is None else saved.manifest.get("imported")
        return {"imported": imported} if imported else {}

    def policy_states(self) -> dict[str, SectionState]:
        """Return what `save_best` writes of this moment. Its tensors are those of the learner."""
        return {s.name: s.state() for s in self._sections if not s.is_collective}

    def save_best(self, states: dict[str, SectionState], env_steps: int) -> bool:
        """Replace the best policy by that of `policy_states`; return whether it was written."""
        with self._best_writing.attempt():
            self._write("best", states, env_steps, keep=1)
        return self._best_writing.error is None

    def check_saved(self) -> None:
        """Raise RunDirError if the last checkpoint of the run could not be written."""
        if (error := self._writing.error) is not None:
            run_dir = self._job.run_dir
            raise RunDirError(
                f"The run has ended, and its last checkpoint could not be written to {run_dir}: "
                f"{error.strerror or error}.\nWhat was learned since the one before is lost. Make "
                f"room, and go on from there: headrace resume {run_dir}"
            )

    def check_finite(self, metrics: dict[str, float], batches: Mapping[str, Fragment]) -> None:
        """Check an update, and remove `nonfinite` from its metrics. Called on all ranks at once.

        Raises:
            NonFiniteError: a gradient or parameter was NaN or infinite. The batches are written.
        """
        if metrics.pop("nonfinite"):
            raise NonFiniteError(
                f"Update {self._learner.version}: a gradient or parameter was NaN or infinite.\n"
                f"Losses: {metrics}\nNothing of this update is saved. Try a smaller lr or "
                "max_grad_norm, or --normalize-reward if rewards are large.\n"
                + self._write_bad_batch(batches)
            )

    def _write_bad_batch(self, batches: Mapping[str, Fragment]) -> str:
        """Write the batches of an update that was not finite, and return where they are.

        A rank whose share holds NaN or infinity writes it. If no
        share does, all ranks write theirs: the numbers overflowed in the update.
        """
        tensors = {
            name if len(batches) == 1 else f"{policy}/{name}": tensor.cpu()
            for policy, fragment in batches.items()
            for name, tensor in named_tensors(fragment).items()
        }
        rank, size = self._ranks.rank, self._ranks.size
        finite = gather_json(self._ranks, all(bool(t.isfinite().all()) for t in tensors.values()))
        name = f"bad_batch_step_{self._counters.env_steps:012d}"
        name += f"_rank{rank}.safetensors" if size > 1 else ".safetensors"
        path, place = self._job.run_dir / name, ""
        if not finite[rank] or all(finite):
            place = f"The batch is in {path}"
            try:
                write_whole(path, checkpoint.to_safetensors(tensors))
            except OSError as error:
                place = f"The batch could not be written to {path}: {error.strerror or error}"
        places = "\n".join(filter(None, gather_json(self._ranks, place)))
        return (
            f"{places}\nThe least and the greatest of each of its arrays: python -c "
            "'import sys, safetensors.torch as s; [print(k, *(m.item() for m in "
            "v.double().aminmax())) for k, v in s.load_file(sys.argv[1]).items() if v.numel()]' "
            "FILE"
        )

    def _write(
        self,
        folder: str,
        states: dict[str, SectionState],
        env_steps: int,
        keep: int,
        rows: dict[str, list[dict[str, Any]]] | None = None,
    ) -> None:
        files, manifest = self.contents(states)
        manifest |= {"rows": rows} if rows else {}
        parent = self._job.run_dir / folder
        path = checkpoint.write(parent, env_steps, files, manifest)
        checkpoint.prune(keep, path)


def write_policies(job: Job, learner: Learner, parent: Path, env_steps: int) -> Path:
    """Write the policies alone, as a checkpoint has them; return the new directory below `parent`.

    Raises:
        OSError: it cannot be written.
    """
    sections = [module_section(f"policy_{name}", of) for name, of in learner.policies.items()]
    files = {section.name: section.state()[0] for section in sections}
    manifest = {
        "headrace": headrace.__version__,
        "seed": job.settings.run.seed,
        "policies": describe_policies(job, learner),
    }
    return checkpoint.write(parent, env_steps, files, manifest)


def describe_policies(job: Job, learner: Learner) -> dict[str, Any]:
    """Return what a manifest says of each policy."""
    return {
        name: {
            "algo": job.settings.run.algo,
            "algo_settings": asdict(job.settings.of(name).algo),
            "model": job.settings.run.model,
            **((learner.frozen[name].learned_by or {}) if name in learner.frozen else {}),
            "network": asdict(learner.networks[name]),
            "spec": job.spec.for_agents(share).to_json(),
            "agents": [share.first, share.first + share.size],
        }
        for name, share in job.shares.items()
    }
