"""The model's own sampling defaults, as its generation_config.json gives them."""

import json
from pathlib import Path

_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(folder: str | Path) -> dict[str, float | int]:
    """Defaults for requests that leave a field out; empty when the model states none.

    Hugging Face's top_k 0 means the whole vocabulary, here -1.
    """
    path = Path(folder) / "generation_config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    found: dict[str, float | int] = {}
    for key in _KEYS:
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = value
    if found.get("top_k") == 0:
        found["top_k"] = -1
    return found
