"""Models of the hub: ids, what is in the cache, and fetching the files that loading reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.checkpoints.folder import GGUF, missing_weights
from outrider.checkpoints.refusal import first_line
from outrider.hub import IGNORED_PATTERNS, MODEL_PATTERNS, HubUnreachable, check_fetchable, downloaded, reach_hub
from target_service.model.loading.inspection import Inspected, in_words, inspect, refusal_of

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo
    from huggingface_hub.hf_api import ModelInfo


class PullFailed(OSError):
    """A model could not be fetched; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub at a branch, tag or commit; at the branch main without one."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId:
        """Read ORG/NAME or ORG/NAME@REVISION. Raises `FileNotFoundError` for what can only be a folder that does not
        exist; the hub's library checks the name further."""
        if text.startswith(("/", ".", "~")) and not Path(text).is_dir():
            raise FileNotFoundError("there is no such folder")
        name, _, revision = text.partition("@")
        return cls(name, revision or None)

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def whole_snapshot(model: HubId) -> Path | None:
    """The folder of a model in the cache with all of its weights; None if any are missing."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and not missing_weights(folder) else None


def fetch(model: HubId) -> Path:
    """Fetch what loading reads of a model into the hub's cache, unless it is there already. A model in the cache is
    returned when the hub does not answer; without one that raises `HubUnreachable`. Raises `PullFailed` where the hub
    does not have it or refuses it, it does not fit the disk, or it cannot be served."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    cached = whole_snapshot(model)
    if cached is not None and model.revision is not None and re.fullmatch("[0-9a-f]{40}", model.revision):
        return cached
    try:
        if constants.HF_HUB_OFFLINE:
            raise HubUnreachable("HF_HUB_OFFLINE is set")
        reach_hub()
    except HubUnreachable as error:
        if cached is not None:
            return cached
        raise HubUnreachable(
            f"it is no folder, it was not fetched before, and {error}; name a folder, or one of `outrider model list`"
        ) from None
    name, revision = model.name, model.revision
    with _asking_for(model):
        # For a list of files, from a hub that has just answered. Chosen, not measured.
        listed = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=30.0)
    _check_files(model, listed)
    with _asking_for(model):
        # Before the weights, which may take hours.
        config = hf_hub_download(name, "config.json", revision=revision, endpoint=constants.ENDPOINT)
    if refusal := refusal_of(Path(config).parent):
        raise PullFailed(f"{model} is not fetched, for it cannot be served: {refusal}")
    with _asking_for(model):
        return downloaded(name, revision)


def fetch_head(name: str) -> None:
    """Fetch what the target reads of a draft's head, a hub id, into the hub's cache, unless it is there already. Raises
    `HubUnreachable` where the hub does not answer, `PullFailed` where it does not have it or refuses it, and
    `ValueError` where no hub can have such a name."""
    head = HubId(name)
    if whole_snapshot(head) is None:
        check_fetchable(name)
        # What the target reads of a draft's head.
        with _asking_for(head):
            downloaded(name, patterns=("*.json", "*.safetensors"), ignored=())


def cached_models() -> Iterator[tuple[str, Inspected]]:
    """Names of models in the hub's cache, sorted, and what their folders hold. Only those with a config.json."""
    for repo in sorted(_cached_repos(), key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            if not (revision.snapshot_path / "config.json").exists():
                continue
            names = [str(HubId(repo.repo_id, None if ref == "main" else ref)) for ref in sorted(revision.refs)]
            name = names[0] if names else str(HubId(repo.repo_id, revision.commit_hash))
            yield name, inspect(revision.snapshot_path)


def check_space(model: str, needed: int, folder: Path) -> None:
    """Raise `PullFailed` unless `needed` bytes fit the disk of `folder`, which may not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise PullFailed(f"{model} takes {in_words(needed)} more, and {folder} has {in_words(free)} free")


def _check_files(model: HubId, listed: ModelInfo) -> None:
    """Raise `PullFailed` for a model without safetensors, and for one that does not fit the disk."""
    from huggingface_hub import constants

    files = [file for file in listed.siblings or [] if _is_read(file.rfilename)]
    names = {file.rfilename for file in files}
    if "adapter_config.json" in names:
        raise PullFailed(f"{model} is a LoRA adapter: merge it into its base model, and serve that")
    if "config.json" not in names:
        raise PullFailed(f"{model} has no config.json")
    if not any(name.endswith(".safetensors") for name in names):
        gguf = any(file.rfilename.endswith(".gguf") for file in listed.siblings or [])
        what = GGUF if gguf else "pickled weights are not fetched"
        raise PullFailed(f"{model} has no safetensors; {what}")
    # The cache stores files under the hashes of their contents, for all revisions together.
    cached = {
        file.blob_path.name
        for repo in _cached_repos()
        if repo.repo_id == model.name
        for revision in repo.revisions
        for file in revision.files
    }
    missing = [file for file in files if (file.lfs.sha256 if file.lfs else file.blob_id) not in cached]
    check_space(str(model), sum(file.size or 0 for file in missing), Path(constants.HF_HUB_CACHE))


def _is_read(name: str) -> bool:
    """Whether loading reads a file of this name; `snapshot_download` matches patterns in the same way."""
    return any(fnmatch(name, one) for one in MODEL_PATTERNS) and not any(fnmatch(name, one) for one in IGNORED_PATTERNS)


def _cached_repos() -> list[CachedRepoInfo]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


@contextmanager
def _asking_for(model: HubId) -> Iterator[None]:
    """Failures of the hub become a `PullFailed` of one line."""
    import httpx
    from huggingface_hub import constants, errors

    try:
        yield
        return
    except errors.GatedRepoError:
        reason = f"is gated: accept its terms at {constants.ENDPOINT}/{model.name}, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"is not at {constants.ENDPOINT}, or it is private: then set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"is not there: {model.name} has no revision {model.revision}"
    except (httpx.HTTPError, OSError) as error:
        reason = f"could not be fetched: {first_line(error)} (complete files are kept; pull it again)"
    raise PullFailed(f"{model} {reason}") from None
