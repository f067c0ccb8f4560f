"""A trained model on the Hugging Face hub: only if it is asked for, and private."""

from __future__ import annotations

import logging
from pathlib import Path

from lamina.errors import UserError, one_line

logger = logging.getLogger(__name__)


def check_repository(name: str) -> None:
    """Raise UserError for a malformed name, and where no token is stored, before anything is trained."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = f"is no repository's name ({one_line(error)}; allowed: OWNER/NAME)"
        raise UserError(f"push_to_hub: {name!r} {reason}") from None
    if get_token() is None:
        allowed = "allowed: after `hf auth login`, or with HF_TOKEN"
        raise UserError(f"push_to_hub: {name!r} needs a token of the Hugging Face hub ({allowed})")


def push(folder: Path, name: str) -> bool:
    """Upload a model's folder to a repository, which is created private where there is none; returns whether it worked.

    A failure is logged with the command that uploads the folder later: the model itself is on disk.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with Lamina")
    except Exception as error:  # the hub's client raises dozens of types; the training is done and must not be lost
        logger.warning("push_to_hub: %s (%s); later: hf upload %s %s", name, one_line(error), name, folder)
        return False
    logger.info("pushed to %s", getattr(commit, "repo_url", name))
    return True
