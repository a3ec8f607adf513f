"""The flags of ``outrider train``; defaults are those of TrainSpec."""

from typing import NamedTuple

DATA, DRAFT, LOSS, LEARNING, TIME, SERVING = (
    "data",
    "draft",
    "loss",
    "learning",
    "time",
    "serving defaults",
)
GROUPS = ("run", DATA, DRAFT, LOSS, LEARNING, TIME, SERVING)


class Flag(NamedTuple):
    """One field of TrainSpec on the command line."""

    name: str
    kind: type
    help: str
    group: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    many: bool = False
    required: bool = False
    both_ways: bool = False


FLAGS = (
    Flag(
        "algorithm",
        str,
        "STANDALONE, EAGLE, EAGLE3, DFLASH or DSPARK",
        "run",
        metavar="ALGORITHM",
        required=True,
    ),
    Flag("model", str, "the target: pycoder, a folder or a Hugging Face id", "run", required=True),
    Flag("output", str, "folder of the draft, its state and its log", "run", required=True),
    Flag("resume", bool, "go on with the run in --output", "run"),
    Flag("device", str, "where to train", "run", choices=("auto", "cpu", "cuda")),
    Flag("compile", bool, "torch.compile (default: on CUDA)", "run", both_ways=True),
    Flag("seed", int, "of weights, order and prompts", "run", "N"),
    Flag(
        "data",
        str,
        'files or folders: text, JSON lines ("text" or "prompt"), token ids (.npy, .bin of uint16)',
        DATA,
        "PATH",
        many=True,
        required=True,
    ),
    Flag(
        "selection_data",
        str,
        "what to select and measure by, instead of a part of --data",
        DATA,
        "PATH",
        many=True,
    ),
    Flag(
        "selection_bytes",
        int,
        "documents whose SHA-1 begins so are for the selection",
        DATA,
        "N",
        many=True,
    ),
    Flag(
        "excluded_bytes", int, "documents whose SHA-1 begins so are left out", DATA, "N", many=True
    ),
    Flag("sequence_length", int, "tokens of a row", DATA, "N"),
    Flag("on_policy_rows", int, "rows with the target's own greedy text in them", DATA, "N"),
    Flag("on_policy_tokens", int, "how many such tokens follow a prompt", DATA, "N"),
    Flag(
        "on_policy_prompts",
        int,
        "lengths of their prompts in turns, several to a row (default: one that fills it)",
        DATA,
        "N",
        many=True,
    ),
    Flag("on_policy_share", float, "such rows' part of a batch", DATA, "PART"),
    Flag(
        "on_policy_source",
        str,
        "by the engine, or by training's own batched decoding",
        DATA,
        choices=("engine", "dense"),
    ),
    Flag(
        "on_policy_cache", str, "folder that keeps such rows (default: the output)", DATA, "FOLDER"
    ),
    Flag("selection_rows", int, "rows that a selection looks at", DATA, "N"),
    Flag("prompt_weight", float, "weight of text that is not the target's own", DATA, "W"),
    Flag(
        "initial_draft",
        str,
        "draft of the same form, or with wider MLPs, or for block drafts of fewer layers, whose "
        "weights to begin with",
        DRAFT,
        "FOLDER",
    ),
    Flag(
        "feature_layers",
        int,
        "EAGLE3, DFLASH, DSPARK: target layers whose entering streams it takes",
        DRAFT,
        "N",
        many=True,
    ),
    Flag(
        "draft_vocab_size",
        int,
        "EAGLE3: a head of its own for the most frequent tokens only",
        DRAFT,
        "N",
    ),
    Flag("own_head", bool, "EAGLE3: a head of its own for all tokens", DRAFT),
    Flag("hidden_size", int, "STANDALONE: its width (default: half the target's)", DRAFT, "N"),
    Flag("intermediate_size", int, "width of the MLP", DRAFT, "N"),
    Flag(
        "num_hidden_layers",
        int,
        "its layers (default: STANDALONE 2, DFLASH and DSPARK 3)",
        DRAFT,
        "N",
    ),
    Flag("num_attention_heads", int, "query heads (default: the target's)", DRAFT, "N"),
    Flag("num_key_value_heads", int, "KV heads (default: the target's)", DRAFT, "N"),
    Flag("head_dim", int, "size of a head", DRAFT, "N"),
    Flag(
        "block_size",
        int,
        "DFLASH: tokens of a block with the bonus token (8); DSPARK: drafted tokens (7)",
        DRAFT,
        "N",
    ),
    Flag(
        "mask_token_id",
        int,
        "DFLASH, DSPARK: what stands for tokens to come (default: the tokenizer's <|MASK|>)",
        DRAFT,
        "ID",
    ),
    Flag("sliding_window", int, "DFLASH, DSPARK: window of sliding layers", DRAFT, "N"),
    Flag("sliding_layers", int, "which those are (default: all)", DRAFT, "N", many=True),
    Flag("markov_rank", int, "DSPARK: rank of its Markov head (default: H / 8)", DRAFT, "N"),
    Flag("markov_head", str, "DSPARK: its kind", DRAFT, choices=("vanilla", "gated", "rnn")),
    Flag("unroll", int, "steps that are drafted in training (default: 5)", LOSS, "N"),
    Flag(
        "loss",
        str,
        "cross-entropy to the target, or with total variation in it",
        LOSS,
        choices=("kl", "lk"),
    ),
    Flag(
        "hard_weight", float, "part of the loss that is on the target's first choice", LOSS, "PART"
    ),
    Flag(
        "start_focus",
        float,
        "part of the loss of drafts that goes by how unsure the target was where they begin",
        LOSS,
        "PART",
    ),
    Flag("step_decay", float, "weight of a step beside the one before", LOSS, "W"),
    Flag("survival_floor", float, "what a step still weighs after a rejected one", LOSS, "W"),
    Flag("feature_weight", float, "EAGLE: weight of the loss on features", LOSS, "W"),
    Flag("anchors", int, "DFLASH, DSPARK: blocks of a row", LOSS, "N"),
    Flag(
        "block_weighting",
        str,
        "of a block's tokens (default: DFLASH dpace, DSPARK decay)",
        LOSS,
        choices=("decay", "dpace"),
    ),
    Flag("decay_gamma", float, "decay: token i weighs exp(-i / GAMMA)", LOSS, "GAMMA"),
    Flag("dpace_alpha", float, "dpace: smoothing of acceptance chances", LOSS, "PART"),
    Flag("ce_weight", float, "DSPARK: of its cross-entropy", LOSS, "W"),
    Flag("l1_weight", float, "DSPARK: of its L1 distance", LOSS, "W"),
    Flag("confidence_weight", float, "DSPARK: of its confidence head's loss", LOSS, "W"),
    Flag(
        "confidence_greedy",
        float,
        "DSPARK: part of its confidence that is of greedy decoding, the rest of sampling",
        LOSS,
        "PART",
    ),
    Flag("batch_size", int, "rows of a step", LEARNING, "N"),
    Flag(
        "optimizer",
        str,
        "Muon with AdamW for norms and tables, or AdamW alone",
        LEARNING,
        choices=("muon", "adamw"),
    ),
    Flag("matrix_lr", float, "Muon's learning rate", LEARNING, "LR"),
    Flag("adam_lr", float, "AdamW's learning rate", LEARNING, "LR"),
    Flag("weight_decay", float, "Muon's weight decay", LEARNING, "W"),
    Flag("warmup", float, "part of the schedule in which rates rise", LEARNING, "PART"),
    Flag("decay", float, "part of the schedule in which rates fall to 0", LEARNING, "PART"),
    Flag("schedule", str, "how they fall", LEARNING, choices=("linear", "cosine")),
    Flag("grad_clip", float, "largest norm of the gradient", LEARNING, "NORM"),
    Flag(
        "ema",
        float,
        "decay of a moving average of the weights, which is exported; 0: none",
        LEARNING,
        "DECAY",
    ),
    Flag("steps", int, "the schedule ends after so many steps", TIME, "N"),
    Flag("minutes", float, "the schedule ends after so many minutes of training", TIME, "N"),
    Flag("max_minutes", float, "end this command after so many minutes; see --resume", TIME, "N"),
    Flag("checkpoint_minutes", float, "minutes between checkpoints", TIME, "N"),
    Flag("log_every", int, "steps between figures", TIME, "N"),
    Flag("selection_every", int, "steps between looks at the selection", TIME, "N"),
    Flag("draft_steps", int, "steps (default: the unroll)", SERVING, "N"),
    Flag("topk", int, "branches", SERVING, "N"),
    Flag("num_draft_tokens", int, "draft tokens (default: steps + 1)", SERVING, "N"),
)
