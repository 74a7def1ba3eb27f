"""Filming an environment's first episode. Left out: environments that cannot draw themselves."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from headrace.envs.factory import EnvMaker
from headrace.errors import MissingExtraError, UsageError


class _Film:
    """Writes a frame after the first reset and after each step of the first episode.

    Not a Gymnasium wrapper: those refuse an environment that is only like Gymnasium's.
    """

    def __init__(self, env: Any, path: Path, write_frames: Any) -> None:
        self.env = env
        self._path, self._write_frames = path, write_frames
        self._writer: Any = None
        self._resets = 0

    def reset(self, **kwargs: Any) -> Any:
        self._resets += 1
        if self._resets > 1:
            self._finish()
        result = self.env.reset(**kwargs)
        if self._resets == 1:
            frame = self._frame()
            fps = getattr(self.env, "metadata", {}).get("render_fps", 30)
            self._writer = _begun(self._path, frame, fps, self._write_frames)
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if self._writer is not None:
            self._writer.send(self._frame())
        return result

    def close(self) -> None:
        self._finish()
        self.env.close()

    def _frame(self) -> Any:
        frame: Any = self.env.render()
        return frame.copy(order="C")

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def filmed(maker: EnvMaker, path: Path) -> Any:
    """One environment that writes its first episode to `path` (MP4).

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        UsageError: the environment does not draw itself into arrays.
    """
    write_frames = _writing(path)
    env = maker(render_mode="rgb_array")
    if getattr(env, "render_mode", None) != "rgb_array":
        raise UsageError(
            f"{maker.name} offers no render_mode 'rgb_array', which a video needs "
            f"(it has {getattr(env, 'metadata', {}).get('render_modes', [])}).\n"
            "Let your callable take render_mode and pass it on to the environment."
        )
    return _Film(env, path, write_frames)


def write_film(path: Path, frames: Iterable[Any], fps: int) -> None:
    """Write pictures `[height, width, 3]` uint8, all of one size, to `path` (MP4).

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        UsageError: it is no name of a video.
    """
    write_frames, pictures = _writing(path), iter(frames)
    writer = _begun(path, next(pictures), fps, write_frames)
    try:
        for picture in pictures:
            writer.send(picture)
    finally:
        writer.close()


def _writing(path: Path) -> Any:
    """What writes a video."""
    if path.suffix != ".mp4":
        raise UsageError(f"The video {path} cannot be written: expected a name that ends in .mp4.")
    try:
        from imageio_ffmpeg import write_frames
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A video needs a package that is not installed ({error}).\n"
            "To install it: pip install 'headrace[video]'"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_frames


def _begun(path: Path, first: Any, fps: int, write_frames: Any) -> Generator[None, Any, None]:
    """A film with its first picture; it is sent the others."""
    height, width = first.shape[:2]
    # macro_block_size 2: H.264 needs even sides, and no more
    writer: Generator[None, Any, None] = write_frames(
        str(path),
        (width, height),
        fps=fps,
        macro_block_size=2,
        output_params=["-loglevel", "error"],
    )
    writer.send(None)
    writer.send(first)
    return writer
