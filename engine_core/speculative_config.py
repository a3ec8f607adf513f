"""vLLM's ``--speculative-config``, translated to the engine's flags."""

import json

import msgspec

from .refusal import Refused

_METHODS = {"draft_model": "STANDALONE"}  # the others have the algorithm's name
_WITH_MODEL = ("EAGLE", "EAGLE3", "STANDALONE")
_TEXTS = {
    "model": "speculative_draft_model_path",
    "revision": "speculative_draft_model_revision",
}
_KEYS = ("method", "model", "num_speculative_tokens", "revision")


def apply_speculative_config(text: str) -> dict[str, str | int] | Refused:
    """Translate vLLM's ``--speculative-config`` JSON to flag values.

    vLLM counts drafts without the bonus token: they are a draft model's steps, of a chain,
    or DSPARK's block; elsewhere one less than SGLang's ``num_draft_tokens``.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        return Refused("speculative_config", f"must be a JSON object: {error}")
    repeated = _repeated_key(text)
    if repeated is not None:
        return Refused("speculative_config", f"has {repeated!r} twice; give it once")
    for key in raw:
        if key == "prompt_lookup_max":
            return Refused(
                "speculative_config",
                "prompt_lookup_max bounds the matched n-gram alone, for which there is no setting "
                "here; leave it out, or bound the match and what follows it together with "
                "--speculative-ngram-max-trie-depth",
                501,
            )
        if key not in _KEYS:
            return Refused(
                "speculative_config",
                f"key {key!r} is not supported; supported: {', '.join(_KEYS)}",
                501,
            )
    if "method" not in raw:
        return Refused("speculative_config", 'needs "method", e.g. {"method": "ngram"}')
    for key in ("method", "model", "revision"):
        if not isinstance(raw.get(key, ""), str):
            return Refused("speculative_config", f"{key} must be a string")
    method = str(raw["method"])
    algorithm = _METHODS.get(method, method.upper())
    out: dict[str, str | int] = {"speculative_algorithm": algorithm}
    out |= {field: str(raw[key]) for key, field in _TEXTS.items() if key in raw}
    if "num_speculative_tokens" in raw:
        count = raw["num_speculative_tokens"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            return Refused(
                "speculative_config", "num_speculative_tokens must be a whole number of 1 or more"
            )
        if algorithm in _WITH_MODEL:
            out["speculative_num_steps"] = count
        elif algorithm == "DSPARK":
            out["speculative_dspark_block_size"] = count
        else:
            out["speculative_num_draft_tokens"] = count + 1
    return out


def _repeated_key(text: str) -> str | None:
    """A key that the JSON object ``text`` has more than once, of which decoding keeps the last."""
    pairs: list[tuple[str, object]] = json.loads(text, object_pairs_hook=list, parse_int=str)
    keys = [key for key, _ in pairs]
    return next((key for key in keys if keys.count(key) > 1), None)
