"""Models by the names that they have on Hugging Face, as vLLM takes them.

With Python's standard library alone until one is fetched.
"""

from pathlib import Path

FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


def is_hub_name(model: Path) -> bool:
    """Whether it is OWNER/NAME, and no folder that is there or could lie in one that is.

    Example:
        >>> is_hub_name(Path("Qwen/Qwen3-8B")), is_hub_name(Path("/models/Qwen3-8B"))
        (True, False)
    """
    return len(model.parts) == 2 and model.parts[0] not in ("/", "..", "~") and not model.parent.exists()


def folder_of(model: Path) -> Path:
    """The folder of a model; one that is only named is fetched first, or found where it was fetched to before.

    Raises:
        ValueError: it cannot be fetched; one line.
    """
    if not is_hub_name(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        remedy = f"bash scripts/prepare_model.sh {model} goes on where a download stopped; or name its folder"
        raise ValueError(f"{model}: no such folder, and not fetched from Hugging Face ({reason}): {remedy}") from error
