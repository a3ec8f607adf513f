"""``meta_info`` of an answer under SGLang's keys; shared by HTTP, SDK and offline use."""

import msgspec

from ..engine_core.messages import FinishReason, RequestStats


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is reported beside the text of a request; ``spec_*`` only when a drafter is loaded.

    ``e2e_latency``: seconds. ``spec_accept_length`` (tau): tokens that verify steps emitted,
    bonus included, over verify steps (docs/wire-protocol.md); ``spec_accept_rate``: correct over
    proposed drafts; both are 0 when there were none. ``spec_verify_length``: tokens that a verify
    step verified, bonus included, on average. ``spec_plain_steps``: decode steps without a
    draft. ``simulated``: the accept lengths were forced and the text is not the model's.
    """

    id: str
    finish_reason: dict[str, str | int] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    num_retractions: int | msgspec.UnsetType = msgspec.UNSET
    spec_accept_length: float | msgspec.UnsetType = msgspec.UNSET
    spec_accept_rate: float | msgspec.UnsetType = msgspec.UNSET
    spec_verify_length: float | msgspec.UnsetType = msgspec.UNSET
    spec_verify_ct: int | msgspec.UnsetType = msgspec.UNSET
    spec_num_correct_drafts: int | msgspec.UnsetType = msgspec.UNSET
    spec_num_proposed_drafts: int | msgspec.UnsetType = msgspec.UNSET
    spec_correct_drafts_histogram: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    spec_plain_steps: int | msgspec.UnsetType = msgspec.UNSET
    spec_off_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    simulated: bool = False

    def to_dict(self) -> dict[str, object]:
        """As a plain dictionary, without the keys that do not apply."""
        built = msgspec.to_builtins(self)
        assert isinstance(built, dict)
        return built


def finish_reason_dict(finish: FinishReason, completion_tokens: int) -> dict[str, str | int]:
    """SGLang's finish reason object: type, and what ended the request."""
    if finish.kind == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.kind == "abort":
        reason: dict[str, str | int] = {"type": "abort", "message": finish.message or "aborted"}
        return reason if finish.status == 200 else {**reason, "status_code": finish.status}
    if finish.matched is None:
        return {"type": "stop"}
    return {"type": "stop", "matched": finish.matched}


def running_meta_info(
    rid: str, prompt_tokens: int, completion_tokens: int, simulated: bool = False
) -> MetaInfo:
    """What is known before a request ends."""
    return MetaInfo(
        id=rid,
        finish_reason=None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        simulated=simulated,
    )


def final_meta_info(
    rid: str,
    finish: FinishReason,
    stats: RequestStats,
    e2e_latency: float,
    speculation: bool,
    simulated: bool = False,
) -> MetaInfo:
    """The whole ``meta_info`` of a finished request; ``speculation``: a drafter is loaded."""
    meta = MetaInfo(
        id=rid,
        finish_reason=finish_reason_dict(finish, stats.completion_tokens),
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        cached_tokens=stats.cached_tokens,
        e2e_latency=e2e_latency,
        num_retractions=stats.retractions,
        simulated=simulated,
    )
    if not speculation:
        return meta
    return msgspec.structs.replace(
        meta,
        spec_accept_length=_ratio(stats.verify_tokens, stats.verify_ct),
        spec_accept_rate=_ratio(stats.correct_drafts, stats.proposed_drafts),
        spec_verify_length=_ratio(stats.verify_ct + stats.proposed_drafts, stats.verify_ct),
        spec_verify_ct=stats.verify_ct,
        spec_num_correct_drafts=stats.correct_drafts,
        spec_num_proposed_drafts=stats.proposed_drafts,
        spec_correct_drafts_histogram=stats.histogram,
        spec_plain_steps=stats.plain_ct,
        spec_off_reason=stats.spec_off_reason,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
