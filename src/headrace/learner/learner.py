"""The learner of one rank: updates each policy of the run from its batch."""

import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import EpochsConfig, LossSpec, Metrics, Named, Recordable, UpdateContext
from headrace.algos.schedules import in_force
from headrace.algos.targets import most_rows
from headrace.batch import Fragment, Minibatch, each, join, one_of_each, select
from headrace.config.algorithms import GRADIENTS, TARGETS
from headrace.config.policies import DEFAULT, sides_of
from headrace.config.settings import Settings
from headrace.device_seeding import permutations as permutations_on_device
from headrace.distributed.of_envs import OfEnvs
from headrace.distributed.ranks import SINGLE_RANK, Ranks, check_same
from headrace.errors import ConfigError
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.learner.frozen import load_frozen, seed_of_weights, untrained_policy
from headrace.learner.learned_state import LearnedState
from headrace.learner.optimizer import GradientSteps, Loss, Optimizer, Outside, without_denormals
from headrace.learner.recorded import Recorded
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.models.fast_paths import choose, describe_choice, replacement
from headrace.models.policy import Network, Policy, torch_seed
from headrace.replay.buffer import ReplayBuffer
from headrace.replay.hindsight import GoalReward
from headrace.returns import discounted_sum
from headrace.seeding import env_orders, permutations
from headrace.spec import Agents, EnvSpec
from headrace.storage.checkpoint import Checkpoint, Section, SectionState, module_section

_SHARED = "version", "learner_steps", "_steps_made", "_has_normalized", "_return_gamma"


def loss_of(spec: LossSpec, config: Any, *, compiled: bool) -> Loss:
    """Return a loss with these settings as a module."""
    return Loss(spec.module, lambda of, rows: spec.function(of, rows, config), compiled=compiled)


class PolicyLearner:
    """The learner of one policy: its modules, optimizers and normalizers.

    Args:
        model: builds the user's network; None: Headrace's own.
        dtype: replaces the dtype of the weights, for comparisons.
        num_agents: agents of each environment that the policy acts for.
        outside: the policy, if its gradient steps are made elsewhere; None: builds one.

    Attributes:
        modules: of the algorithm, by name: all that is learned or saved.
        gradients: what computes the gradient of each loss, in words.
        version: updates made so far.
        learner_steps: optimizer steps made so far.
    """

    def __init__(
        self,
        settings: Settings,
        spec: EnvSpec,
        model: ModelFactory | None,
        device: torch.device,
        meter: Meter,
        ranks: Ranks = SINGLE_RANK,
        dtype: torch.dtype | None = None,
        name: str = DEFAULT,
        num_agents: int = 1,
        outside: Outside | None = None,
    ) -> None:
        self._settings, self._device, self._meter, self._ranks = settings, device, meter, ranks
        self._name, self._own_model, self._outside = name, model is not None, outside
        self._in_turns = spec.interface == "turns"
        self.policy = outside.policy if outside else untrained_policy(settings, spec, model, name)
        self.gradients: dict[str, str] = {}
        rows = settings.run.num_envs // ranks.size * num_agents
        with torch_seed(seed_of_weights(settings, "modules", name)):
            self.modules = settings.algorithm.build(
                self.policy, spec, settings.network, settings.algo, rows, ranks
            )
        for module in self.modules.values():
            # Data stay as they are. None: float32, and float64 normalizers
            module.to(device=device, dtype=None if isinstance(module, OfEnvs) else dtype)
        losses = settings.algorithm.losses(self.modules, settings.algo)
        self.optimizers = {loss: self._optimizer(loss, spec) for loss, spec in losses.items()}
        self._learned = LearnedState(self.modules, self.optimizers, ranks)
        self._graphs: dict[str, Recorded] = {}
        self._steps = {loss: self._step_of(loss, spec) for loss, spec in losses.items()}
        self._counted = next(iter(losses))
        self.version = self.learner_steps = 0
        # Of the update under way, which may have to be made again after the loss of another rank
        self._steps_made, self._steps_to_skip, self._has_normalized = 0, 0, False
        self.return_so_far = torch.zeros(rows, device=device)
        self._return_gamma: float | None = None  # that it was discounted by

    def _optimizer(self, name: str, spec: LossSpec) -> GradientSteps:
        if self._outside is not None:
            self.gradients[name] = "made elsewhere"
            return self._outside.steps
        run, meter, ranks = self._settings.run, self._meter, self._ranks
        arguments = spec.module, self._settings.network, self._settings.algo
        path, reason = choose(GRADIENTS, spec.function, *arguments)
        if run.compile:
            path, reason = None, "--compile"
        graph = ", of small minibatches as a CUDA graph" if self._can_be_recorded else ""
        self.gradients[name] = describe_choice(path, f"autograd{graph}", reason)
        wrap = partial(ranks.wrap, meter=meter, may_skip=spec.may_skip or self._own_model)
        return Optimizer(
            loss_of(spec, self._settings.algo, compiled=run.compile),
            spec.max_grad_norm,
            run.num_accumulation_steps,
            eps=spec.adam_eps,
            beta1=spec.adam_beta1,
            manual=None if path is None else path.make(*arguments),
            wrap=wrap if path is None else lambda loss: loss,
            over_ranks=lambda gradient: ranks.mean(gradient, meter),
        )

    def _step_of(self, name: str, spec: LossSpec) -> Recordable:
        """Return the gradient step of a loss: (`minibatch`, `lr`) -> metrics."""
        optimizer, prepare = self.optimizers[name], spec.prepare
        if prepare is not None and not self._settings.run.compile:
            prepare = replacement(TARGETS, prepare, self._settings.network)

        def step(of: Named) -> Named:
            minibatch = of["minibatch"]
            if prepare is not None:
                with torch.no_grad():
                    minibatch = minibatch | prepare(minibatch)
            return optimizer.step(minibatch, of["lr"])

        return self._recorded(f"step of {name}")(step)

    def _recorded(self, name: str) -> Callable[[Recordable], Recordable]:
        """Return what `UpdateContext.recorded` documents."""

        def decorator(function: Recordable) -> Recordable:
            if not self._can_be_recorded:
                return function
            if name not in self._graphs:
                self._graphs[name] = Recorded(function, self._device)
            return self._graphs[name]

        return decorator

    @property
    def _can_be_recorded(self) -> bool:
        """Whether parts of updates may be CUDA graphs: one GPU makes them, and nothing waits."""
        is_alone = self._device.type == "cuda" and self._ranks is SINGLE_RANK
        is_whole = is_alone and not self._own_model and self._outside is None
        return is_whole and self._settings.may_be_recorded

    def set_goal_reward(self, make: Callable[[], GoalReward]) -> None:
        """Give the environment's reward of goals to a buffer that replaces goals."""
        for module in self.modules.values():
            if isinstance(module, ReplayBuffer) and module.episodes is not None:
                module.goal_reward = make()

    def assemble(self, fragments: list[Fragment]) -> Fragment:
        """Join fragments `[T, n]` in order to a batch `[T, N]` on the learner's device."""
        # No copy at lag 0: workers write to fragments again for the next batch only.
        batch = join(fragments, self._device, copy=self._settings.run.lag > 0)
        self._meter.lap("transport")
        return batch

    def update(self, batch: Fragment, env_steps: int, new_env_steps: int = 0) -> dict[str, float]:
        """Learn from a batch of `assemble`, after `env_steps` of the whole run.

        Args:
            new_env_steps: those of the batch, of all ranks.

        Returns:
            Metrics; `nonfinite` counts gradients and parameters that were not finite.
        """
        run = self._settings.run
        config = in_force(self._settings.algo, env_steps, run.schedule_env_steps)
        if self._in_turns:
            # The last rows have no agent's move.
            parts = config.num_minibatches if isinstance(config, EpochsConfig) else 1
            batch = batch.first_rows(most_rows(batch.valid, self._ranks, parts))
        context: UpdateContext[Any] = UpdateContext(
            self.policy, self.modules, config,
            step=self._step,
            recorded=self._recorded,
            minibatch_order=partial(self._minibatch_order, batch),
            ranks=self._ranks,
            progress=min(1.0, env_steps / run.schedule_env_steps),
            seed=run.seed,
            version=self.version,
            learner_steps=self.learner_steps,
            env_steps=env_steps,
            new_env_steps=new_env_steps,
            lap=self._meter.lap,
        )  # fmt: skip
        # Empty normalizers change nothing, so the first batch sets them before it is learned from.
        # Later ones are merged after learning: at lag 0 it sees the same normalization as acting.
        is_first = self.version == 0 and self.policy.has_empty_normalizers
        if is_first:
            self._update_normalizers(batch, config.gamma)
        for optimizer in self.optimizers.values():
            optimizer.start_update()
        # Which steps of a replay are due follows from those that were made.
        self._steps_to_skip = 0 if self._settings.algorithm.data == "replay" else self._steps_made
        with self._ranks.meeting(), without_denormals():
            metrics = dict(self._settings.algorithm.update(batch, context))
        if run.lag:
            metrics |= self._lag(batch)
        if not self._has_normalized:
            self._update_normalizers(batch, config.gamma)
        self.version += 1
        self._steps_made, self._has_normalized = 0, False
        bad = [optimizer.num_nonfinite() for optimizer in self.optimizers.values()]
        metrics["nonfinite"] = sum(bad[1:], bad[0])
        # The host waits for the device only here, where normalizers select valid rows, where
        # `target_kl` may end the epochs, with recurrent cores, and where a replay stores rows.
        local = torch.stack([torch.as_tensor(m, device=self._device) for m in metrics.values()])
        values = self._ranks.gather(local).mean(0).tolist()
        self._meter.lap("learn")
        return dict(zip(metrics, values, strict=True))

    def warning(self, metrics: dict[str, float]) -> str:
        """Return what the metrics of an update warn of, or ""."""
        return self._settings.algorithm.warning(metrics, self._settings.algo)

    def _step(self, loss: str, minibatch: Minibatch, lr: float) -> Metrics:
        if loss not in self._steps:
            known = ", ".join(self._steps)
            raise ConfigError(f"step({loss!r}, ...): expected a loss of the algorithm: {known}.")
        if self._steps_to_skip:  # made before a rank was lost
            self._steps_to_skip -= 1
            return {}
        metrics = self._steps[loss]({"minibatch": minibatch, "lr": lr})
        self.learner_steps += loss == self._counted
        self._steps_made += 1
        return metrics

    def _minibatch_order(self, batch: Fragment, num_epochs: int) -> Tensor:
        """Return what `UpdateContext.minibatch_order` documents."""
        seed, version, env_id = self._settings.run.seed, self.version, batch.env_id
        if self.policy.state_size:
            # By column: an asynchronous batch can have an env twice, or not at all.
            num_envs, first = batch.num_envs, batch.num_envs * self._ranks.rank
            of_all = env_orders(seed, num_envs * self._ranks.size, version, num_epochs)
            return torch.from_numpy(of_all[:, first : first + num_envs])
        if env_id.device.type != "cpu":
            return permutations_on_device(seed, env_id, version, num_epochs, batch.num_steps)
        order = permutations(seed, env_id.numpy(), version, num_epochs, batch.num_steps)
        return torch.from_numpy(order)

    def _lag(self, batch: Fragment) -> dict[str, Tensor]:
        """Compute metrics of the age of the acting weights, in updates."""
        # Weights, since selecting the valid rows would make the host wait for the device.
        valid = batch.valid.float()
        lag = (self.version - batch.policy_version) * valid
        mean = lag.sum() / valid.sum().clamp(min=1)
        return {"lag_learning": mean, "lag_learning_max": lag.max()}

    @torch.no_grad()
    def _update_normalizers(self, batch: Fragment, gamma: float) -> None:
        """Merge the observations and the discounted returns of a batch into the normalizers."""
        valid = batch.valid
        if self.policy.normalize_obs is not None:
            seen = self.policy.seen_by_critic(each(lambda o: o[:-1], batch.obs))
            self.policy.normalize_obs.update(seen, valid, self._ranks)
        if self.policy.normalize_reward is not None:
            if self._return_gamma not in (None, gamma):
                self.return_so_far.zero_()
            self._return_gamma = gamma
            done = batch.terminated | batch.truncated
            reward = self.policy.clipped(batch.reward)
            total = torch.empty_like(reward)
            env = batch.env_id - len(self.return_so_far) * self._ranks.rank
            # An env is in a batch twice only if workers step during updates.
            for columns in one_of_each(env) if self._settings.run.lag else (slice(None),):
                start = self.return_so_far[env[columns]]
                sums = discounted_sum(reward[:, columns], done[:, columns], start, gamma)
                total[:, columns], self.return_so_far[env[columns]] = sums[:-1], sums[-1]
            self.policy.normalize_reward.update(total[valid], self._ranks)
        self._has_normalized = True

    @property
    def position(self) -> tuple[int, int]:
        """How far this learner is: updates, and gradient steps of the update under way."""
        return self.version, self._steps_made

    def shared_state(self) -> SectionState:
        """Return what is the same on all ranks, also within an update."""
        state = {f"policy.{key}": tensor for key, tensor in self.policy.state_dict().items()}
        state |= {f"learned.{key}": tensor for key, tensor in self._learned.alike().items()}
        return state, {name: getattr(self, name) for name in _SHARED}

    def load_shared_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over the state of another rank."""
        self.policy.load_state_dict(select(tensors, "policy."))
        self._learned.load_alike(select(tensors, "learned."))
        for name in _SHARED:
            setattr(self, name, values[name])

    def sections(self) -> list[Section]:
        """Return the sections of the policy and its optimizers."""
        learned = Section(
            f"learner_{self._name}",
            self._save_learned,
            self._load_learned,
            is_collective=True,
            rows=self._learned.rows,
        )
        return [module_section(f"policy_{self._name}", self.policy), learned]

    def _save_learned(self) -> SectionState:
        returns = {"return_so_far": self._ranks.gather(self.return_so_far).flatten()}
        return returns | self._learned.tensors(), {"return_gamma": self._return_gamma}

    def _load_learned(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        running = tensors["return_so_far"].chunk(self._ranks.size)
        self.return_so_far = running[self._ranks.rank].to(self._device)
        self._return_gamma = values.get("return_gamma")  # old checkpoints lack it
        self._learned.load(tensors)


class Learner:
    """The learner of a run: updates its policies from batches. Frozen policies only act.

    Args:
        shares: the agents of each policy.
        model: builds the user's network; None: Headrace's own.
        saved: the checkpoint of a resumed run.
        dtype: replaces the dtype of the weights, for comparisons.
        outside: the policy that is not frozen, if its gradient steps are made elsewhere.

    Attributes:
        policies: by name, in the order of their agents' ids.
        networks: network settings of each policy.
        learners: of the policies that are not frozen.
        frozen: the others.

    Raises:
        CheckpointError: a frozen policy cannot be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        shares: dict[str, Agents],
        spec: EnvSpec,
        model: ModelFactory | None,
        device: torch.device,
        meter: Meter,
        ranks: Ranks = SINGLE_RANK,
        saved: Checkpoint | None = None,
        dtype: torch.dtype | None = None,
        outside: Outside | None = None,
    ) -> None:
        self._ranks = ranks
        sides = sides_of(shares, league=settings.run.league > 0)
        self._policy_of_side = [policy for policy, _ in sides.values()]
        self.policies: dict[str, Policy] = {}
        self.networks: dict[str, Network] = {}
        self.learners: dict[str, PolicyLearner] = {}
        self.frozen: dict[str, TrainedPolicy] = {}
        for name, share in shares.items():
            of_policy, agents_spec = settings.of(name), spec.for_agents(share)
            if source := settings.run.frozen.get(name):
                frozen = load_frozen(source, name, of_policy, agents_spec, model, saved)
                self.frozen[name] = frozen
                self.policies[name], self.networks[name] = frozen.module.to(device), frozen.network
            else:
                learner = PolicyLearner(
                    of_policy, agents_spec, model, device, meter, ranks, dtype, name, share.size,
                    outside,
                )  # fmt: skip
                self.learners[name] = learner
                self.policies[name], self.networks[name] = learner.policy, of_policy.network

    @property
    def gradient(self) -> str:
        """What computes gradients, in words."""
        each = [words for one in self.learners.values() for words in one.gradients.values()]
        return " and ".join(dict.fromkeys(each))

    @property
    def version(self) -> int:
        """Updates made so far, by all policies: the version of the weights."""
        return min(learner.version for learner in self.learners.values())

    @property
    def learner_steps(self) -> int:
        """Optimizer steps of all policies so far."""
        return sum(learner.learner_steps for learner in self.learners.values())

    def assemble(self, fragments: list[Fragment]) -> dict[str, Fragment]:
        """Build each policy's batch `[T, N]` on the learner's device.

        Args:
            fragments: `[T, n]` of each vector, in order; of each vector one of each policy, or in
                a league of each side.
        """
        sides = itertools.cycle(self._policy_of_side)
        of_policy: dict[str, list[Fragment]] = {name: [] for name in self.learners}
        for name, fragment in zip(sides, fragments, strict=False):
            if name in of_policy:
                of_policy[name].append(fragment)
        return {name: self.learners[name].assemble(of) for name, of in of_policy.items()}

    def update(
        self, batches: dict[str, Fragment], env_steps: int, new_env_steps: int = 0
    ) -> dict[str, float]:
        """Learn from the batches of `assemble`, after `env_steps` of the whole run.

        Args:
            new_env_steps: those of the batches, of all ranks.

        Returns:
            Metrics; of several policies by POLICY/METRIC. `nonfinite` counts gradients and
            parameters that were not finite.
        """
        metrics: dict[str, float] = {"nonfinite": 0.0}
        version = self.version
        for name, learner in self.learners.items():
            if learner.version > version:  # it was updated before a rank was lost
                continue
            prefix = f"{name}/" if len(self.policies) > 1 else ""
            updated = learner.update(batches[name], env_steps, new_env_steps)
            metrics["nonfinite"] += updated.pop("nonfinite")
            metrics |= {prefix + metric: value for metric, value in updated.items()}
        return metrics

    @property
    def positions(self) -> list[tuple[int, int]]:
        """How far each policy's learner is; see `PolicyLearner.position`."""
        return [learner.position for learner in self.learners.values()]

    def leave_ranks(self) -> None:
        """Keep no connection to the other ranks, after the loss of one."""
        for learner in self.learners.values():
            for optimizer in learner.optimizers.values():
                optimizer.leave_ranks()

    def join_ranks(self) -> None:
        """Average gradients over the ranks that there are then. Called on all of them at once."""
        for learner in self.learners.values():
            for optimizer in learner.optimizers.values():
                optimizer.join_ranks()

    def shared_state(self) -> SectionState:
        """Return what is the same on all ranks, also within an update."""
        states = {name: learner.shared_state() for name, learner in self.learners.items()}
        tensors = {f"{name}/{key}": t for name, (of, _) in states.items() for key, t in of.items()}
        return tensors, {name: values for name, (_, values) in states.items()}

    def load_shared_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over the state of another rank."""
        for name, learner in self.learners.items():
            learner.load_shared_state(select(tensors, f"{name}/"), values[name])

    def warnings(self, metrics: dict[str, float]) -> list[str]:
        """Return what the metrics of an update warn of."""
        found = []
        for name, learner in self.learners.items():
            prefix = f"{name}/" if len(self.policies) > 1 else ""
            if warning := learner.warning(select(metrics, prefix)):
                found.append(f"{name}: {warning}" if prefix else warning)
        return found

    def check_equal(self) -> None:
        """Compare the ranks' parameters bit by bit. Raise RankError if they differ."""
        digest = hashlib.sha256()
        for policy in self.policies.values():
            for tensor in policy.state_dict().values():
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        check_same(self._ranks, digest.digest(), f"After update {self.version}, the parameters")

    def sections(self) -> list[Section]:
        """Return the learner's sections of a checkpoint."""
        frozen = [
            module_section(f"policy_{name}", policy)
            for name, policy in self.policies.items()
            if name not in self.learners
        ]
        learned = [section for each in self.learners.values() for section in each.sections()]
        return [*frozen, *learned, Section("learner", self._counts, self._load_counts)]

    def _counts(self) -> SectionState:
        by_policy = {name: learner.learner_steps for name, learner in self.learners.items()}
        counts = {"version": self.version, "learner_steps": self.learner_steps}
        return {}, counts | {"learner_steps_by_policy": by_policy}

    def _load_counts(self, _: dict[str, Tensor], data: dict[str, Any]) -> None:
        # Earlier checkpoints have the sum alone.
        equal_parts = dict.fromkeys(self.learners, data["learner_steps"] // len(self.learners))
        steps = data.get("learner_steps_by_policy", equal_parts)
        for name, learner in self.learners.items():
            learner.version, learner.learner_steps = data["version"], steps[name]
