"""The names that trainers give a draft's tensors, and ours."""

# "model." is optional in front of all of them.
_PREFIXES = (
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_OUTSIDE = ("lm_head.weight", "d2t", "t2d")


def our_name(name: str) -> str:
    """What a decoder of ours calls tensor ``name``: ``model.layers.0.…``, ``model.fc.weight``, …"""
    short = name.removeprefix("model.")
    for theirs, ours in _PREFIXES:
        if short.startswith(theirs):
            short = ours + short.removeprefix(theirs)
    return short if short in _OUTSIDE else f"model.{short}"
