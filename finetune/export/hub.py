"""Upload an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.artifact import record_made_by
from finetune.errors import HubError
from finetune.export.settings import HubSettings

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write to this repository"


def push_folder(folder: Path, *, hub: HubSettings, api: Any = None) -> str:
    """Create the repository where there is none, upload ``folder`` in one commit, and return the repository's address.

    ``api`` is a ``huggingface_hub.HfApi``, by default one with the user's own token. Raises HubError with what to do.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    assert record_made_by(folder) == "export", "only an exported folder is uploaded"
    api = api or HfApi()
    try:
        address = api.create_repo(hub.repo_id, private=hub.private, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=hub.repo_id, folder_path=str(folder), repo_type="model", commit_message=hub.commit_message
        )
    except OfflineModeIsEnabled as cause:
        raise HubError("the Hub is switched off", where=hub.repo_id, fix="unset HF_HUB_OFFLINE") from cause
    except LocalTokenNotFoundError as cause:
        raise HubError("there is no Hub token on this machine", where=hub.repo_id, fix=LOGIN) from cause
    except HfHubHTTPError as cause:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        refused = status in (401, 403) or isinstance(cause, RepositoryNotFoundError)
        raise HubError(
            f"the Hub refused the upload{f' (HTTP {status})' if status else ''}: {str(cause).splitlines()[0]}",
            where=hub.repo_id,
            fix=LOGIN if refused else "try again later; the folder on disk is finished",
        ) from cause
    except Exception as cause:  # the transport's own errors, whose library changes with huggingface_hub's version
        raise HubError(
            f"the Hub can't be reached: {cause}",
            where=hub.repo_id,
            fix="check the network; the folder on disk is finished",
        ) from cause
    return str(address)
