"""Shared policies on the Hugging Face Hub, by its own client, which is an extra.

Left out: what a shared policy consists of (`shared_policy.py`), and the login, which is the
client's.
"""

import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError, HubError, MissingExtraError, install_command
from headrace.interop.shared_policy import FILM, check_names

PREFIX = "hf:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def repository(place: str) -> str:
    """Return the repository that a place names, or "" for a directory; ConfigError if it is none.

    Args:
        place: a directory, or `hf:USER/NAME`.
    """
    if not place.startswith(PREFIX):
        return ""
    name = place.removeprefix(PREFIX)
    if not _NAME.fullmatch(name) or len(name) > 96:
        raise ConfigError(f"{place}: expected hf:USER/NAME, as in hf:jane/cartpole-ppo.")
    return name


def client(place: str) -> Any:
    """Return the hub's client; MissingExtraError without its package."""
    try:
        from huggingface_hub import HfApi  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise MissingExtraError(
            f"{place} is on the Hugging Face Hub. To reach it, install its client:\n"
            f"{install_command('hub')}"
        ) from None
    return HfApi()


def upload(api: Any, repo_id: str, folder: Path, message: str) -> str:
    """Put a shared policy into a repository, which is made if needed; return its address.

    Raises:
        HubError: the hub refuses it, or cannot be reached.
        CheckpointError: the repository has other files, which are left alone.
    """

    def put() -> str:
        api.create_repo(repo_id=repo_id, repo_type="model", exist_ok=True)
        before = set(api.list_repo_files(repo_id=repo_id, repo_type="model"))
        if before - {"README.md", ".gitattributes"}:
            check_names(before, f"{PREFIX}{repo_id}")
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type="model",
            commit_message=message,
            delete_patterns=["policy_*.safetensors", FILM],  # of an earlier push
        )
        return f"https://huggingface.co/{repo_id}"

    return str(_asked(repo_id, put))


def download(api: Any, repo_id: str, folder: Path) -> None:
    """Get a shared policy from a repository into a directory that does not exist.

    Raises:
        HubError: the hub has no such repository, or cannot be reached.
        CheckpointError: the repository has unexpected files; none was downloaded.
    """

    def get() -> None:
        revision = api.model_info(repo_id=repo_id).sha  # all of one commit
        names = api.list_repo_files(repo_id=repo_id, repo_type="model", revision=revision)
        check_names(names, f"{PREFIX}{repo_id}")
        folder.mkdir()
        for name in names:
            path = api.hf_hub_download(
                repo_id=repo_id, filename=name, repo_type="model", revision=revision
            )
            shutil.copyfile(path, folder / name)

    _asked(repo_id, get)


def _asked(repo_id: str, ask: Callable[[], Any]) -> Any:
    """Ask the hub; whatever its client raises becomes a HubError."""
    try:
        return ask()
    except HeadraceError:
        raise
    except Exception as error:  # of the client, of HTTP, of the operating system: by its version
        if _is_of_network(error):
            raise HubError(
                f"The hub cannot be reached ({PREFIX}{repo_id}): {error}\n"
                "Look after the network, or share a directory in its place."
            ) from error
        raise HubError(
            f"The hub did not do it ({PREFIX}{repo_id}): {error}\n"
            "To log in: hf auth login. The name is USER/NAME, as the hub shows it."
        ) from error


def _is_of_network(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is of a connection."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False
