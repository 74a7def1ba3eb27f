"""One rank's learner: its policy, optimizer, normalizers and version.

Left out: what is computed from a batch (the algorithm's page), when (`loop.py`), files
(`checkpoint.py`).
"""

import hashlib
import zlib
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace import batch
from headrace.algos.ppo_manual_gradient import gradient_for
from headrace.batch import Fragment, Minibatch, each
from headrace.config.policies import DEFAULT
from headrace.config.resolve import Settings
from headrace.device_seeding import permutations as permutations_on_device
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.errors import ConfigError, RankError
from headrace.learner.optimizer import Optimizer
from headrace.meter import Meter
from headrace.models import policy as policies
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.models.recurrent import Core
from headrace.returns import discounted_sum
from headrace.seeding import derive, env_orders, permutations
from headrace.spec import EnvSpec
from headrace.storage.sections import Section, SectionState, module_section


class Loss(nn.Module):
    """The algorithm's loss as a module: what `Ranks.wrap` averages gradients over."""

    def __init__(self, policy: Policy, algo: ModuleType, cfg: Any, *, compiled: bool) -> None:
        super().__init__()
        self.policy, self._cfg = policy, cfg
        if compiled:
            _check_compiler()
            for part in policy.modules():
                if isinstance(part, Core):
                    part.stay_out_of_graphs()
        self._loss = torch.compile(algo.loss) if compiled else algo.loss

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch, and what to report of it."""
        return self._loss(self.policy, minibatch, self._cfg)  # type: ignore[no-any-return]


def _check_compiler() -> None:
    """Raises ConfigError where torch.compile would fail in the first update, in other words."""
    # Here: most runs do without what this imports.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=True, but torch.compile finds no C++ compiler that works.\n"
            "Install g++ (or name one by CXX), or train without --compile."
        ) from error


class Learner:
    """Turns batches into better weights.

    Args:
        settings: the run's.
        spec: of the environment.
        model: makes the user's own network, if there is one.
        device: where to compute.
        meter: of this process.
        ranks: of the job.
        dtype: of the arithmetic, where it is another than the policy's own: to compare with.
        name: of the policy, where there are several.
        num_agents: of each environment, that it acts for.
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
    ) -> None:
        self._settings, self._device, self._meter, self._ranks = settings, device, meter, ranks
        self._name = name
        self.policy = first_policy(settings, spec, model, name)
        self.policy.to(device=device, dtype=dtype)  # None: float32, and float64 normalizers
        run = settings.run
        cfg = settings.algo
        loss: nn.Module = Loss(self.policy, settings.algo_module, cfg, compiled=run.compile)
        by_hand = None if run.compile else gradient_for(self.policy, settings.network, cfg)
        if by_hand is None:
            loss = ranks.wrap(loss, meter, may_skip=model is not None)
        self.optimizer = Optimizer(
            loss,
            cfg.max_grad_norm,
            run.num_accumulation_steps,
            eps=cfg.adam_eps,
            written_out=by_hand,
            over_ranks=lambda gradient: ranks.mean(gradient, meter),
        )
        self.version = 0
        """Updates made so far: the version of the weights."""
        self.learner_steps = 0
        """Optimizer steps made so far."""
        rows = run.num_envs // ranks.size * num_agents
        self._return_so_far = torch.zeros(rows, device=device)

    def take(self, fragments: list[Fragment]) -> Fragment:
        """A batch on the learner's device: fragments `[T, n]`, side by side in order."""
        # At lag 0 they are not written to before the next batch.
        experience = batch.join(fragments, self._device, copy=self._settings.run.lag > 0)
        self._meter.lap("transport")
        return experience

    def update(self, experience: Fragment, progress: float) -> dict[str, float]:
        """Learn from one batch.

        Args:
            experience: from `take`.
            progress: share of the schedules that has passed, in [0, 1].

        Returns:
            Metrics; `nonfinite` counts gradients and parameters that were not finite.
        """
        algo = self._settings.algo_module
        env_id, num_envs = experience.env_id, experience.num_envs
        seed, num_steps = self._settings.run.seed, experience.num_steps
        first = num_envs * self._ranks.rank

        def orders(num_epochs: int) -> Tensor:
            if self.policy.state_size:
                # By the column: a batch of what was there first has some env twice, and some never.
                of_all = env_orders(seed, num_envs * self._ranks.size, self.version, num_epochs)
                return torch.from_numpy(of_all[:, first : first + num_envs])
            if env_id.device.type != "cpu":
                return permutations_on_device(seed, env_id, self.version, num_epochs, num_steps)
            found = permutations(seed, env_id.numpy(), self.version, num_epochs, num_steps)
            return torch.from_numpy(found)

        steps_before = self.optimizer.num_steps
        with self._ranks.meeting():
            metrics: dict[str, Tensor] = algo.update(
                self.policy,
                self.optimizer.step,
                experience,
                self._settings.algo,
                ranks=self._ranks,
                progress=progress,
                orders=orders,
            )
        if self._settings.run.lag:
            metrics |= self._lag(experience)
        self._update_normalizers(experience)
        self.version += 1
        self.learner_steps += self.optimizer.num_steps - steps_before
        metrics["nonfinite"] = self.optimizer.num_nonfinite()
        # The only place in an iteration where the host waits for the device.
        own = torch.stack([metric.to(self._device) for metric in metrics.values()])
        values = self._ranks.gather(own).mean(0).tolist()
        self._meter.lap("learn")
        return dict(zip(metrics, values, strict=True))

    def _lag(self, experience: Fragment) -> dict[str, Tensor]:
        """How many updates old the weights are that acted, as they are learned from."""
        # By weights: picking the valid rows would make the host wait for the device.
        valid = experience.valid.float()
        lag = (self.version - experience.policy_version) * valid
        mean = lag.sum() / valid.sum().clamp(min=1)
        return {"lag_learning": mean, "lag_learning_max": lag.max()}

    @torch.no_grad()
    def _update_normalizers(self, experience: Fragment) -> None:
        """After the update: while learning, what was acted must look as it did then."""
        valid = experience.valid
        if self.policy.normalize_obs is not None:
            seen = self.policy.seen(each(lambda o: o[:-1], experience.obs))
            self.policy.normalize_obs.update(seen, valid, self._ranks)
        if self.policy.normalize_reward is not None:
            done = experience.terminated | experience.truncated
            reward = self.policy.clipped(experience.reward)
            total = torch.empty_like(reward)
            env = experience.env_id - len(self._return_so_far) * self._ranks.rank
            # Only what samples while this learns gives an env twice.
            for columns in _one_of_each(env) if self._settings.run.lag else (slice(None),):
                start, gamma = self._return_so_far[env[columns]], self._settings.algo.gamma
                sums = discounted_sum(reward[:, columns], done[:, columns], start, gamma)
                total[:, columns], self._return_so_far[env[columns]] = sums[:-1], sums[-1]
            self.policy.normalize_reward.update(total[valid], self._ranks)

    @property
    def policies(self) -> dict[str, Policy]:
        """By name; here there is one."""
        return {self._name: self.policy}

    @property
    def networks(self) -> dict[str, Network]:
        """The shape of each policy's network."""
        return {self._name: self._settings.network}

    def check_equal(self) -> None:
        """Compare all ranks' parameters, bit for bit; RankError if they are not the same."""
        digest = hashlib.sha256()
        for tensor in self.policy.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        found = [of.hex() for of in self._ranks.gather_bytes(digest.digest())]
        if len(set(found)) > 1:
            listed = "\n".join(f"  rank {rank}: {of[:16]}" for rank, of in enumerate(found))
            raise RankError(
                f"After update {self.version}, the ranks' parameters are not the same:\n{listed}\n"
                "The likely cause is something that differs between their machines or versions."
            )

    def sections(self) -> list[Section]:
        """Return what checkpoints hold of this learner."""
        return [*self.policy_sections(), counts_section(self)]

    def policy_sections(self) -> list[Section]:
        """Return the sections of the policy and of its optimizer, without the counts."""
        return [
            module_section(f"policy_{self._name}", self.policy),
            Section(f"learner_{self._name}", self._learned, self._load_learned, is_collective=True),
        ]

    def _learned(self) -> SectionState:
        running = self._ranks.gather(self._return_so_far).flatten()
        return self.optimizer.state() | {"return_so_far": running}, {}

    def _load_learned(self, tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        running = tensors["return_so_far"].chunk(self._ranks.size)
        self._return_so_far = running[self._ranks.rank].to(self._device)
        self.optimizer.load_state(tensors)

    def set_counts(self, version: int, learner_steps: int) -> None:
        """Go on counting from there."""
        self.version, self.learner_steps = version, learner_steps


def counts_section(learner: "Learns") -> Section:
    """Return the section of the numbers of updates and of optimizer steps."""
    return Section(
        "learner",
        lambda: ({}, {"version": learner.version, "learner_steps": learner.learner_steps}),
        lambda _, data: learner.set_counts(data["version"], data["learner_steps"]),
    )


def first_policy(
    settings: Settings, spec: EnvSpec, model: ModelFactory | None, name: str
) -> Policy:
    """A policy as it is before it has learned: another one for each name."""
    path = () if name == DEFAULT else (zlib.crc32(name.encode()),)
    seed = derive(settings.run.seed, "model", *path)
    return policies.build(spec, settings.network, seed, model)


def _one_of_each(env: Tensor) -> list[Tensor]:
    """Columns of a batch, parted so that an env's later fragments come after its earlier ones."""
    seen: dict[int, int] = {}
    parts: list[list[int]] = []
    for column, i in enumerate(env.tolist()):
        seen[i] = seen.get(i, -1) + 1
        if seen[i] == len(parts):
            parts.append([])
        parts[seen[i]].append(column)
    return [torch.tensor(part, device=env.device) for part in parts]


# The interface of a learner: of one policy (`learner.py`) or several (`multi_policy.py`).


class Learns(Protocol):
    """Turns batches into better weights; see `Learner` for what each of these is."""

    @property
    def version(self) -> int:
        """Updates made so far."""

    @property
    def learner_steps(self) -> int:
        """Optimizer steps made so far."""

    @property
    def policy(self) -> Any:
        """What collectors are to act with."""

    @property
    def policies(self) -> dict[str, Policy]:
        """All that act, by name."""

    @property
    def networks(self) -> dict[str, Network]:
        """The shape of each policy's network."""

    def take(self, fragments: list[Fragment]) -> Any:
        """A batch on the learner's device."""

    def update(self, experience: Any, progress: float) -> dict[str, float]:
        """Learn from one batch."""

    def check_equal(self) -> None:
        """Compare all ranks' parameters."""

    def sections(self) -> list[Section]:
        """Return what checkpoints hold of this learner."""

    def set_counts(self, version: int, learner_steps: int) -> None:
        """Go on counting from there."""
