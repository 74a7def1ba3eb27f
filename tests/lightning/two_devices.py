"""A script that trains on two devices: Lightning starts it a second time for the other one.

Usage: two_devices.py FOLDER MAX_EPOCHS [CHECKPOINT]
"""

import json
import sys
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from headrace.lightning import Experience, PolicyModule

SETTINGS = {
    "num_learners": 2, "num_envs": 8, "num_steps": 16, "envs_per_vector": 2, "num_workers": 0,
    "num_minibatches": 4, "num_epochs": 2, "total_env_steps": 3 * 128, "seed": 3,
    "hidden_sizes": (8, 8), "arithmetic": "plain", "normalize_obs": True, "check_ranks": 1,
}  # fmt: skip

if __name__ == "__main__":
    folder, max_epochs, *given = sys.argv[1:]
    checkpoint = given[0] if given else None
    experience = Experience("CartPole-v1", **SETTINGS)
    trainer = Trainer(
        max_epochs=int(max_epochs), accelerator="cpu", devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="last")],
    )  # fmt: skip
    trainer.fit(PolicyModule(experience), datamodule=experience, ckpt_path=checkpoint)
    metrics = Path(folder) / f"rank{trainer.global_rank}.json"
    metrics.write_text(json.dumps(experience.metrics))
