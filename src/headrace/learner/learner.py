"""One rank's learner: its policy, optimizer, normalizers and version.

Left out: what is computed from a batch (the algorithm's page), when (`loop.py`), files
(`checkpoint.py`).
"""

import hashlib
import zlib
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.algos.base import LossSpec, UpdateContext
from headrace.batch import Fragment, Minibatch, each, join
from headrace.config.algorithms import GRADIENTS
from headrace.config.policies import DEFAULT
from headrace.config.resolve import Settings
from headrace.device_seeding import permutations as permutations_on_device
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.errors import ConfigError, RankError
from headrace.learner.optimizer import Optimizer
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.models.fast_paths import choose, describe_choice
from headrace.models.policy import Network, Policy, torch_seed
from headrace.models.recurrent import Core
from headrace.returns import discounted_sum
from headrace.seeding import derive, env_orders, permutations
from headrace.spec import EnvSpec
from headrace.storage.sections import Section, SectionState, module_section


class Loss(nn.Module):
    """A loss of an algorithm as a module: what `Ranks.wrap` averages gradients over."""

    def __init__(self, spec: LossSpec, config: Any, *, compiled: bool) -> None:
        super().__init__()
        self.module, self._config = spec.module, config
        if compiled:
            _check_compiler()
            for part in spec.module.modules():
                if isinstance(part, Core):
                    part.stay_out_of_graphs()
        self._function = torch.compile(spec.function) if compiled else spec.function

    def forward(self, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, and its metrics."""
        return self._function(self.module, minibatch, self._config)


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
        self._name, self._own_model = name, model is not None
        self.policy = first_policy(settings, spec, model, name)
        self.gradient = ""
        """What computes gradients, in words."""
        self._modules = settings.algorithm.build(self.policy, spec, settings.algo)
        for module in self._modules.values():
            module.to(device=device, dtype=dtype)  # None: float32, and float64 normalizers
        losses = settings.algorithm.losses(self._modules, settings.algo)
        self.optimizers = {loss: self._optimizer(of) for loss, of in losses.items()}
        self.version = 0
        """Updates made so far: the version of the weights."""
        self.learner_steps = 0
        """Optimizer steps made so far."""
        rows = settings.run.num_envs // ranks.size * num_agents
        self._return_so_far = torch.zeros(rows, device=device)

    def _optimizer(self, spec: LossSpec) -> Optimizer:
        run, meter, ranks = self._settings.run, self._meter, self._ranks
        loss: nn.Module = Loss(spec, self._settings.algo, compiled=run.compile)
        arguments = self.policy, self._settings.network, self._settings.algo
        path, reason = choose(GRADIENTS, spec.function, *arguments)
        if run.compile:
            path, reason = None, "--compile"
        self.gradient = describe_choice(path, "autograd", reason)
        if path is None:
            loss = ranks.wrap(loss, meter, may_skip=spec.may_skip or self._own_model)
        return Optimizer(
            loss,
            spec.max_grad_norm,
            run.num_accumulation_steps,
            eps=spec.adam_eps,
            manual=None if path is None else path.make(*arguments),
            over_ranks=lambda gradient: ranks.mean(gradient, meter),
        )

    def assemble(self, fragments: list[Fragment]) -> Fragment:
        """Join fragments `[T, n]`, side by side in order, to a batch on the learner's device."""
        # At lag 0 they are not written to before the next batch.
        batch = join(fragments, self._device, copy=self._settings.run.lag > 0)
        self._meter.lap("transport")
        return batch

    def update(self, batch: Fragment, env_steps: int) -> dict[str, float]:
        """Learn from one batch.

        Args:
            batch: from `assemble`.
            env_steps: of the whole run before this batch.

        Returns:
            Metrics; `nonfinite` counts gradients and parameters that were not finite.
        """
        run = self._settings.run
        context: UpdateContext[Any] = UpdateContext(
            self.policy, self._modules, self._settings.algo,
            step=lambda loss, minibatch, lr: self.optimizers[loss].step(minibatch, lr),
            minibatch_order=partial(self._minibatch_order, batch),
            ranks=self._ranks,
            progress=min(1.0, env_steps / run.schedule_env_steps),
            seed=run.seed,
            version=self.version,
            learner_steps=self.learner_steps,
            env_steps=env_steps,
        )  # fmt: skip
        counted = next(iter(self.optimizers.values()))
        steps_before = counted.num_steps
        with self._ranks.meeting():
            metrics = self._settings.algorithm.update(batch, context)
        if run.lag:
            metrics |= self._lag(batch)
        self._update_normalizers(batch)
        self.version += 1
        self.learner_steps += counted.num_steps - steps_before
        bad = [optimizer.num_nonfinite() for optimizer in self.optimizers.values()]
        metrics["nonfinite"] = sum(bad[1:], bad[0])
        # The only place in an iteration where the host waits for the device.
        own = torch.stack([metric.to(self._device) for metric in metrics.values()])
        values = self._ranks.gather(own).mean(0).tolist()
        self._meter.lap("learn")
        return dict(zip(metrics, values, strict=True))

    def _minibatch_order(self, batch: Fragment, num_epochs: int) -> Tensor:
        """See `UpdateContext`."""
        seed, version, env_id = self._settings.run.seed, self.version, batch.env_id
        if self.policy.state_size:
            # By the column: a batch of what was there first has some env twice, and some never.
            num_envs, first = batch.num_envs, batch.num_envs * self._ranks.rank
            of_all = env_orders(seed, num_envs * self._ranks.size, version, num_epochs)
            return torch.from_numpy(of_all[:, first : first + num_envs])
        if env_id.device.type != "cpu":
            return permutations_on_device(seed, env_id, version, num_epochs, batch.num_steps)
        order = permutations(seed, env_id.numpy(), version, num_epochs, batch.num_steps)
        return torch.from_numpy(order)

    def _lag(self, batch: Fragment) -> dict[str, Tensor]:
        """How many updates old the weights are that acted, as they are learned from."""
        # By weights: picking the valid rows would make the host wait for the device.
        valid = batch.valid.float()
        lag = (self.version - batch.policy_version) * valid
        mean = lag.sum() / valid.sum().clamp(min=1)
        return {"lag_learning": mean, "lag_learning_max": lag.max()}

    @torch.no_grad()
    def _update_normalizers(self, batch: Fragment) -> None:
        """After the update: while learning, what was acted must look as it did then."""
        valid = batch.valid
        if self.policy.normalize_obs is not None:
            seen = self.policy.seen(each(lambda o: o[:-1], batch.obs))
            self.policy.normalize_obs.update(seen, valid, self._ranks)
        if self.policy.normalize_reward is not None:
            done = batch.terminated | batch.truncated
            reward = self.policy.clipped(batch.reward)
            total = torch.empty_like(reward)
            env = batch.env_id - len(self._return_so_far) * self._ranks.rank
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
        state = {"return_so_far": self._ranks.gather(self._return_so_far).flatten()}
        for name, optimizer in self.optimizers.items():
            state |= {_prefix(name) + key: t for key, t in optimizer.state().items()}
        return state | self._beside_policy(), {}

    def _beside_policy(self) -> dict[str, Tensor]:
        """What is learned or kept beside the policy, by name."""
        return {
            f"modules.{name}.{key}": tensor
            for name, module in self._modules.items()
            if name != "policy"
            for key, tensor in module.state_dict().items()
        }

    def _load_learned(self, tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        running = tensors["return_so_far"].chunk(self._ranks.size)
        self._return_so_far = running[self._ranks.rank].to(self._device)
        for name, optimizer in self.optimizers.items():
            prefix = _prefix(name)
            optimizer.load_state(
                {
                    key.removeprefix(prefix): t
                    for key, t in tensors.items()
                    if key.startswith(prefix)
                }
            )
        for key, tensor in self._beside_policy().items():
            tensor.copy_(tensors[key])

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


def _prefix(loss: str) -> str:
    """Of a loss's optimizer in the file; the only loss of an actor-critic has none."""
    return "" if loss == "policy" else f"{loss}."


def first_policy(
    settings: Settings, spec: EnvSpec, model: ModelFactory | None, name: str
) -> Policy:
    """A policy as it is before it has learned: another one for each name."""
    path = () if name == DEFAULT else (zlib.crc32(name.encode()),)
    with torch_seed(derive(settings.run.seed, "model", *path)):
        return settings.algorithm.build_policy(spec, settings.network, settings.algo, model)


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
    def gradient(self) -> str:
        """What computes gradients, in words."""

    @property
    def policy(self) -> Any:
        """What collectors are to act with."""

    @property
    def policies(self) -> dict[str, Policy]:
        """All that act, by name."""

    @property
    def networks(self) -> dict[str, Network]:
        """The shape of each policy's network."""

    def assemble(self, fragments: list[Fragment]) -> Any:
        """A batch on the learner's device."""

    def update(self, batch: Any, env_steps: int) -> dict[str, float]:
        """Learn from one batch."""

    def check_equal(self) -> None:
        """Compare all ranks' parameters."""

    def sections(self) -> list[Section]:
        """Return what checkpoints hold of this learner."""

    def set_counts(self, version: int, learner_steps: int) -> None:
        """Go on counting from there."""
