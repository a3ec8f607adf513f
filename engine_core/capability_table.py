"""The data of :mod:`capabilities`: what works, what is refused and why."""

from .capability import Capability, exact, refused

_NO_MEDIA = "only text is supported"
_TEXT_ONLY_CHAT = "chat templates are rendered without options; leave it out"
LABELS = ("user", "metadata", "safety_identifier")

SUPPORTED = (
    exact("prompt", ("prompt", "messages", "text", "input_ids"), "chat needs a chat template"),
    exact("model name", ("model",)),
    exact("request id", ("rid",)),
    exact(
        "greedy",
        (),
        "temperature 0 or top_k 1; equal to plain decoding token for token, whatever the rule",
    ),
    exact(
        "temperature",
        ("temperature",),
        "target's distribution at every accepted position, by the coupled rule or, where "
        "the flags ask for them, by rejection sampling or block verification; lossy, not the "
        "target's distribution, where --speculative-accept-threshold-single or "
        "--speculative-accept-threshold-acc is below 1, as the server says when it starts",
    ),
    exact("top_k", ("top_k",)),
    exact("top_p", ("top_p",)),
    exact("min_p", ("min_p",)),
    exact(
        "seed",
        ("seed", "sampling_seed"),
        "coupled rule: same tokens alone or in any batch, with any drafter and draft length; with "
        "--speculative-use-rejection-sampling, --speculative-use-block-verification or a "
        "--speculative-accept-threshold below 1 only with the same drafter, drafted lengths and "
        "flags: fix them with "
        "--speculative-length-policy fixed and --speculative-ragged-verify-mode static",
    ),
    exact("n", ("n",), "sample i of a seeded request draws with a seed of its own"),
    exact("stop strings", ("stop",), "matched on generated text, token by token"),
    exact("stop_token_ids", ("stop_token_ids",)),
    exact(
        "trimming",
        ("no_stop_trim", "include_stop_str_in_output", "skip_special_tokens"),
        "no_stop_trim keeps the whole token that completed a stop string, the other stops there",
    ),
    exact(
        "max tokens", ("max_new_tokens", "max_tokens", "max_completion_tokens"),
    ),
    exact(
        "min tokens",
        ("min_new_tokens", "min_tokens"),
        "no stop of any kind before token min + 1; a stop string inside stays text",
    ),
    exact("ignore_eos", ("ignore_eos",)),
    exact(
        "logprobs",
        ("logprobs", "return_logprob", "return_text_in_logprobs"),
        "of the raw distribution, before temperature, penalties and filters",
    ),
    exact("top_logprobs", ("top_logprobs", "top_logprobs_num")),
    exact(
        "prompt_logprobs",
        ("prompt_logprobs", "logprob_start_len"),
        "of the raw distribution; the cache is used only before their first position; each of n "
        "samples computes its own; /generate: return_logprob with logprob_start_len from 0 on, "
        "null for the token there",
    ),
    exact("echo", ("echo",), "completions; with logprobs, those of the prompt come first"),
    exact(
        "best_of",
        ("best_of",),
        "completions: the n samples of the highest mean log-probability; not streamed",
    ),
    exact(
        "token ids in answers",
        ("return_token_ids",),
        "completions and chat; /generate has output_ids",
    ),
    exact("presence_penalty", ("presence_penalty",), "history counts drafts before a position"),
    exact("frequency_penalty", ("frequency_penalty",), "as presence_penalty"),
    exact("repetition_penalty", ("repetition_penalty",), "as presence_penalty, prompt included"),
    exact("logit_bias", ("logit_bias",)),
    exact(
        "bad_words",
        ("bad_words", "bad_words_ids"),
        "matched on generated tokens; a word as it is tokenized alone and after a space",
    ),
    exact("allowed_token_ids", ("allowed_token_ids",), "name EOS too if it may end the output"),
    exact(
        "custom logits processors",
        ("logits_processors",),
        "those that the server was started with (--logits-processors), by name with arguments; "
        "history counts drafts before a position; behind penalties, bias, bans and grammars, whose "
        "word stands; --tp-size 1",
    ),
    exact(
        "json_schema",
        ("json_schema", "guided_json"),
        "compact JSON; keys in the order of properties; a keyword that is unknown or cannot be "
        "kept is refused",
    ),
    exact("json_object", ("guided_json_object",), "any object, as compact JSON"),
    exact(
        "regex",
        ("regex", "guided_regex"),
        "matches the whole output; without look-around, word boundaries and back-references",
    ),
    exact("ebnf", ("ebnf", "guided_grammar"), "GBNF with a rule root, or Lark with a rule start"),
    exact("choice", ("guided_choice",), "the output is one of the strings"),
    exact(
        "structural_tag",
        ("structural_tag",),
        "free text in which triggers begin JSON of a schema: structures and triggers, or a format "
        "of type triggered_tags",
    ),
    exact(
        "structured_outputs",
        ("structured_outputs",),
        "json, regex, choice, grammar, json_object or structural_tag; one grammar a request; like "
        "all grammars refused with --tp-size above 1",
    ),
    exact(
        "response_format",
        ("response_format",),
        "text, json_object, json_schema, which holds with and without strict, or structural_tag; "
        "OpenAI only",
    ),
    exact(
        "tools",
        ("tools",),
        "chat; functions only; the model's chat template shows them; calls are found in hermes, "
        "llama3_json, mistral and pythonic format; strict holds by a grammar, with tool_choice "
        "auto in hermes and mistral format only",
    ),
    exact(
        "tool_choice",
        ("tool_choice",),
        "chat; none, auto (needs --tool-call-parser), required or a function, which a grammar "
        "guarantees: a second grammar in the request is refused",
    ),
    exact(
        "parallel_tool_calls",
        ("parallel_tool_calls",),
        "chat; false: one call at most; with auto, further ones are text",
    ),
    exact("streaming", ("stream", "stream_options")),
    exact("priority", ("priority",), "orders requests with --enable-priority-scheduling"),
    exact("cache_salt", ("cache_salt",), "separates tenants in prefix cache and n-gram trie"),
    exact("speculation switch", ("speculative",), "false: this request is decoded without drafts, "
          "those that a grammar forces among them"),
    exact("native sampling", ("sampling_params",), "/generate; its fields are those above"),
    exact("client labels", LABELS, "change nothing by design"),
)  # fmt: skip

REFUSED = (
    refused(
        "grammar backend",
        ("guided_decoding_backend",),
        "there is one, llguidance; leave it out",
    ),
    refused(
        "white space pattern",
        ("guided_whitespace_pattern",),
        'JSON comes without white space; another pattern goes into the schema: "x-guidance": '
        '{"whitespace_pattern": ...}',
    ),
    refused(
        "functions",
        ("functions", "function_call"),
        "OpenAI's older fields; use tools and tool_choice",
    ),
    refused("web search", ("web_search_options",), "there is none; leave it out"),
    refused(
        "beam search",
        ("use_beam_search", "beam_width", "length_penalty", "early_stopping", "num_beams"),
        "use n or temperature 0",
    ),
    refused("suffix", ("suffix",), "write it into the prompt in the model's format for filling in"),
    refused(
        "logprobs of chosen tokens",
        ("token_ids_logprob", "logprob_token_ids"),
        "only the best tokens' log-probabilities are returned (top_logprobs)",
    ),
    refused(
        "LoRA", ("lora_path", "lora_request", "lora_id", "adapter_id"),
        "merge the adapter into the weights",
    ),
    refused(
        "images", ("image_data", "image_url", "multi_modal_data", "mm_processor_kwargs"), _NO_MEDIA
    ),
    refused("audio", ("audio_data", "audio", "input_audio", "modalities"), _NO_MEDIA),
    refused("video", ("video_data", "video_url"), _NO_MEDIA),
    refused(
        "input_embeds", ("input_embeds", "prompt_embeds"), "send text or token ids as the prompt"
    ),
    refused(
        "hidden states",
        ("return_hidden_states", "return_routed_experts"),
        "activations are not returned; leave it out",
    ),
    refused(
        "custom logit processor",
        ("custom_logit_processor", "custom_params"),
        "code in requests is not run; install it as a package, serve with --logits-processors, and "
        "ask for it by its name in logits_processors",
    ),
    refused(
        "vLLM's extra arguments",
        ("vllm_xargs", "extra_args"),
        "they name no processor; give a processor's arguments under its name in logits_processors",
    ),
    refused("stop_regex", ("stop_regex",), "use stop strings or stop_token_ids"),
    refused(
        "sessions", ("session_id", "session_params"),
        "send the whole prompt each time: the prefix cache keeps what was computed",
    ),
    refused("watermark", ("watermark",), "output is not watermarked; leave it out"),
    refused(
        "prefill/decode disaggregation",
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"),
        "a server runs both phases; leave it out",
    ),
    refused(
        "data parallel rank",
        ("data_parallel_rank", "routed_dp_rank"),
        "there is one replica; leave it out",
    ),
    refused(
        "reasoning",
        ("reasoning_effort", "separate_reasoning", "stream_reasoning", "include_reasoning",
         "thinking_budget", "verbosity"),
        "reasoning is not separated from the answer; leave it out",
    ),
    refused(
        "chat template options",
        ("chat_template", "chat_template_kwargs", "continue_final_message",
         "add_generation_prompt", "documents"),
        _TEXT_ONLY_CHAT,
    ),
    refused("add_special_tokens", ("add_special_tokens",), "send token ids instead"),
    refused(
        "detokenizer options",
        ("spaces_between_special_tokens", "detokenize"),
        "text is always made in the usual way; leave it out",
    ),
    refused(
        "truncation", ("truncate_prompt_tokens", "allow_auto_truncate"),
        "prompts are never cut; send one that fits the context",
    ),
    refused(
        "extra answer fields",
        ("return_prompt_token_ids", "return_spec_tokens_details",
         "return_tokens_as_token_ids", "return_sampling_mask"),
        "use /generate: it returns output_ids, and speculation's counters in meta_info",
    ),
    refused("stream_interval", ("stream_interval",), "set --stream-interval on the server"),
    refused("extra_key", ("extra_key",), "use cache_salt"),
    refused(
        "per-request logging", ("custom_labels", "log_metrics"),
        "metrics have no labels; leave it out",
    ),
    refused(
        "predicted outputs", ("prediction",),
        "put the text into the prompt or an external corpus: NGRAM drafts from both",
    ),
    refused("stored answers", ("store", "previous_response_id"), "answers are not stored"),
    refused("service_tier", ("service_tier",), "there is one tier; use priority"),
    refused("other request ids", ("request_id",), "use rid"),
    refused(
        "other samplers",
        ("typical_p", "top_a", "tfs", "mirostat", "dry_multiplier", "xtc_probability",
         "dynatemp_range", "do_sample"),
        "use temperature, top_k, top_p and min_p",
    ),
)  # fmt: skip

TABLE: tuple[Capability, ...] = SUPPORTED + REFUSED

# Values that ask for nothing: of unsupported fields beside null and emptiness (those not named
# here: false), and of supported ones that not every endpoint takes.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "return_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "beam_width": (1,),
    "num_beams": (1,),
    "length_penalty": (1.0,),
    "logprob_start_len": (-1,),
    "guided_decoding_backend": ("auto", "llguidance", "guidance"),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "include_reasoning": (True, False),
    "log_metrics": (True,),
    "typical_p": (1.0,),
    "top_a": (0.0,),
    "tfs": (1.0,),
    "mirostat": (0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "dynatemp_range": (0.0,),
    "do_sample": (),
}
