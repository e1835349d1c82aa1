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
from .headers import MODULES, FactsError, read_json

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
        from huggingface_hub.errors import EntryNotFoundError, SafetensorsParsingError
    except ImportError as error:
        raise FactsError(
            f"The hub's client is needed to read {repo} there ({error}). Install huggingface_hub, or give path."
        ) from error
    # False and not None: the client would send the token of the calling user, who has not given one.
    shown_endpoint = re.sub("//[^/]*@", "//", endpoint)  # without a password
    api = HfApi(endpoint=endpoint, token=token or False)
    try:
        found = api.model_info(repo, revision=revision or "main")
        commit = str(found.sha)
        with tempfile.TemporaryDirectory() as directory:

            def document(name: str) -> dict[str, Any]:
                path = api.hf_hub_download(repo, name, revision=commit, local_dir=directory)
                return read_json(Path(path), "Fetch it again.")

            config = document("config.json")
            quantization = None
            if not model_facts.find_quantization(config):
                try:
                    quantization = document("hf_quant_config.json")
                except EntryNotFoundError:
                    quantization = None
        files = api.get_safetensors_metadata(repo, revision=commit).files_metadata
    except SafetensorsParsingError as error:
        raise FactsError(f"{repo} at {shown_endpoint} has a damaged safetensors file: {error}.") from error
    except FactsError:
        raise
    except Exception as error:  # of the client, and of the HTTP library that it uses, which changes between releases
        raise FactsError(
            f"{repo} cannot be read at {shown_endpoint}: {shorten(str(error), 300)}. Is the name right, the hub within "
            "reach, the licence accepted and the token given? With the files at hand, give path."
        ) from error
    pooling = any(file.rfilename == MODULES for file in found.siblings or ())
    headers = ((name, tensor.dtype, tensor.shape) for file in files.values() for name, tensor in file.tensors.items())
    return model_facts.build_facts(repo, commit, config, headers, quantization, shown_endpoint, pooling)
