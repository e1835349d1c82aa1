# SPDX-License-Identifier: Apache-2.0
"""Reading the facts of a checkpoint from a hub: config.json and the headers of the safetensors files."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from ...text import shorten
from ...weights.access import find_endpoint_mistake, parse_token
from ...weights.record import WeightsError
from ..contract import Facts
from . import model_facts
from .headers import GGUF, INDEX, MODULES, FactsError, describe_gguf, read_json

ENDPOINT = "https://huggingface.co"


def read(repo: str, revision: str, endpoint: str, token: str | None) -> Facts:
    """Read the facts of a repository at one commit from a hub. Raises FactsError."""
    try:
        token = parse_token(token or "", "token")
    except WeightsError as error:
        raise FactsError(str(error)) from error
    mistake = find_endpoint_mistake("model_weights_endpoint", endpoint, bool(token))
    if mistake:
        raise FactsError(mistake)
    os.environ.update(HF_HUB_DISABLE_IMPLICIT_TOKEN="1", HF_TOKEN="")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import SafetensorsParsingError
    except ImportError as error:
        raise FactsError(
            f"The hub's client is needed to read {repo} there ({error}). Install huggingface_hub, or name a directory "
            "with its files."
        ) from error
    # False and not None: the client would send the token of the calling user, who has not given one.
    shown_endpoint = re.sub("//[^/]*@", "//", endpoint)  # without a password
    api = HfApi(endpoint=endpoint, token=token or False)
    try:
        found = api.model_info(repo, revision=revision or "main")
        names, commit = [file.rfilename for file in found.siblings or ()], str(found.sha)
        if any(GGUF.search(name) for name in names) and not any(".safetensors" in name for name in names):
            raise FactsError(describe_gguf(repo))
        with tempfile.TemporaryDirectory() as directory:

            def document(name: str) -> dict[str, Any]:
                path = api.hf_hub_download(repo, name, revision=commit, local_dir=directory)
                return read_json(Path(path), "Fetch it again.")

            config = document("config.json")
            name = "hf_quant_config.json"
            quantization = document(name) if name in names and not model_facts.find_quantization(config) else None
        files = api.get_safetensors_metadata(repo, revision=commit).files_metadata
    except SafetensorsParsingError as error:
        raise FactsError(f"{repo} at {shown_endpoint} has a damaged safetensors file: {error}.") from error
    except FactsError:
        raise
    except Exception as error:  # of the client, and of the HTTP library that it uses, which changes between releases
        raise FactsError(f"{repo} cannot be read at {shown_endpoint}: {_explain(error, revision)}") from error
    headers = ((name, tensor.dtype, tensor.shape) for file in files.values() for name, tensor in file.tensors.items())
    return model_facts.build_facts(repo, commit, config, headers, quantization, shown_endpoint, MODULES in names)


def _explain(error: Exception, revision: str) -> str:
    """Return what an error of the hub's client means, and what to do."""
    kind = type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if kind == "GatedRepoError":
        why = "it is gated. Accept its licence on its page, and give a token of that account"
    elif kind in ("RepositoryNotFoundError", "HFValidationError"):
        why = "there is no such repository, or it is private. Look up how its name is spelt, or give a token for it"
    elif status in (401, 403):
        why = f"the hub refuses with status {status}. Give a token of an account that may read it"
    elif kind == "RevisionNotFoundError":
        return f"it has no revision {revision}. Look up its branches and commits, or leave the revision out."
    elif kind in ("EntryNotFoundError", "RemoteEntryNotFoundError", "NotASafetensorsRepoError"):
        return "it lacks config.json, or weights in safetensors format. Take another repository of this model."
    elif status is not None:
        return f"the hub answers with status {status}. Try again later."
    else:
        return (
            f"no hub answers there ({shorten(str(error), 300)}). Look at the network, its proxy and the address; "
            f"without a network name a directory with config.json and {INDEX}, which were fetched elsewhere."
        )
    return f"{why} (model_weights_token_file)."
