"""Records an environment's first episode as a video, if the environment can draw itself."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from headrace.envs.factory import EnvMaker
from headrace.errors import MissingExtraError, UsageError, install_command


class _Recorder:
    """Records an environment of Gymnasium's form, or a game in one of PettingZoo's.

    It is no wrapper of theirs: those refuse environments that are only like their own.
    """

    def __init__(self, env: Any, path: Path, write_frames: Any) -> None:
        self.env = env
        self._path, self._write_frames = path, write_frames
        self._writer: Any = None
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **kwargs: Any) -> Any:
        self._finish()
        result = self.env.reset(**kwargs)
        if not self._begun:
            self._begun = True
            fps = getattr(self.env, "metadata", {}).get("render_fps", 30)
            self._writer = _open_writer(self._path, self._frame(), fps, self._write_frames)
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        # An agent that has left a game in turns has a turn without a move: nothing is to be seen.
        if self._writer is not None and action is not None:
            self._writer.send(self._frame())
        return result

    def close(self) -> None:
        self._finish()
        self.env.close()

    def _frame(self) -> Any:
        return self.env.render().copy(order="C")

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def record_first_episode(maker: EnvMaker, path: Path) -> Any:
    """Make one environment that writes its first episode to `path` (MP4).

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        UsageError: the environment does not draw itself into arrays.
    """
    write_frames = _load_encoder(path)
    env = maker(render_mode="rgb_array")
    if getattr(env, "render_mode", None) != "rgb_array":
        raise UsageError(
            f"{maker.name} offers no render_mode 'rgb_array', which a video needs "
            f"(it has {getattr(env, 'metadata', {}).get('render_modes', [])}).\n"
            "Let your callable take render_mode and pass it on to the environment."
        )
    return _Recorder(env, path, write_frames)


def write_video(path: Path, frames: Iterable[Any], fps: int) -> None:
    """Write frames `[height, width, 3]` uint8, all of one size, to `path` (MP4).

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        UsageError: the path does not end in .mp4.
    """
    write_frames, frames = _load_encoder(path), iter(frames)
    writer = _open_writer(path, next(frames), fps, write_frames)
    try:
        for frame in frames:
            writer.send(frame)
    finally:
        writer.close()


def _load_encoder(path: Path) -> Any:
    if path.suffix != ".mp4":
        raise UsageError(f"The video {path} cannot be written: expected a name that ends in .mp4.")
    try:
        from imageio_ffmpeg import write_frames
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A video needs a package that is not installed ({error}).\n"
            f"To install it: {install_command('video')}"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_frames


def _open_writer(path: Path, first: Any, fps: int, write_frames: Any) -> Generator[None, Any, None]:
    """Begin a video with its first frame, and return a generator that takes the others."""
    height, width = first.shape[:2]
    # macro_block_size 2: H.264 needs even sides, and no more
    writer: Generator[None, Any, None] = write_frames(
        str(path), (width, height), fps=fps, macro_block_size=2,
        output_params=["-loglevel", "error"],
    )  # fmt: skip
    writer.send(None)
    writer.send(first)
    return writer
