"""Model folders from the Hugging Face hub. huggingface_hub is imported only when one is asked for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from kllm.hub.source import ModelSourceError, weight_files

# Weights as safetensors, and text. Never Python files, never pickles.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_IGNORED = ["*/*", "*.py", "*.bin", "consolidated*"]  # subfolders hold the same weights in other formats
PROBE_S = 4.0


def hub_reachable(repository: str, timeout: float = PROBE_S) -> bool:
    """Whether the hub answers about this repository within timeout seconds; always False under HF_HUB_OFFLINE.

    The question is asked in a thread because name resolution knows no timeout."""
    import huggingface_hub

    answer: list[bool] = []

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(repository, timeout=timeout)
            answer.append(True)
        except Exception:  # offline mode, no name resolution, refused, timed out: whichever, it did not answer
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(timeout)
    return bool(answer) and answer[0]


def fetch_snapshot(repository: str, progress: bool) -> Path:
    """Download (or complete, or update) a hub repository into huggingface_hub's own cache and return its folder.

    Interrupted downloads are resumed by huggingface_hub. Offline, what its cache holds is used if it is complete.
    Raises ModelSourceError when the repository does not exist, cannot be reached, or holds no safetensors."""
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{repository}: the hub asks you to accept its terms and log in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceError(f"{repository}: no such model on the hub, or it is private") from error
    except errors.HFValidationError as error:
        raise ModelSourceError(f"{repository!r} is neither an existing path nor a valid hub id") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelSourceError(
            f"{repository}: not in the local hub cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
        ) from error
    except Exception as error:  # which HTTP client raises what depends on huggingface_hub's version
        raise ModelSourceError(f"{repository}: the hub download failed ({error})") from error
    check_complete(Path(folder))
    return Path(folder)


def check_complete(folder: Path) -> None:
    """Raise ModelSourceError unless config.json, weights and every shard that the index names are there."""
    weight_files(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        weight_map: dict[str, Any] = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{index}: not a valid index of shards") from error
    for shard in shards:
        if not (folder / str(shard)).exists():
            raise ModelSourceError(f"{folder / str(shard)}: missing, the download is incomplete")
