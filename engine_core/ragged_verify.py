"""Ragged verify: how a step verifies what was drafted, and the tables that its planner goes by."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from .drafter_spec import DrafterSpec
from .refusal import Refused
from .sps_table import AdditiveTable, SpsTable, StepTable, read_sps
from .sts_table import STS_FILE, StsTable, identity_sts, read_sts
from .table_files import TableError, decode_table, read_bytes
from .verify_budget import VerifyRules

if TYPE_CHECKING:
    from .config import EngineConfig

RaggedMode = Literal["static", "cap-accept", "compact"]
VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"

_SPS = "speculative_dspark_sps_table_path"
_STS = "speculative_dspark_confidence_sts_path"
_ALIGN = "speculative_dspark_align_verify_tokens_to_graph_tier"


class RaggedVerify(msgspec.Struct, frozen=True, kw_only=True):
    """What the core and its worker know of it; the tables' contents, so that a trace has them.

    ``temperatures``: one a draft position, of a drafter whose confidence plans the lengths; empty
    where none does. ``step_costs`` or ``additive_costs``: the SPS table, if there is one.
    ``align``: a graph's spare tokens become drafts. ``sizes``: query tokens of the graphs that
    steps of verify rows alone run in; none where they run in their exact size.
    """

    mode: RaggedMode = "static"
    temperatures: tuple[float, ...] = ()
    step_costs: StepTable | None = None
    additive_costs: AdditiveTable | None = None
    align: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def planned(self) -> bool:
        """Whether confidence decides which drafts are verified."""
        return bool(self.temperatures)

    @property
    def trims(self) -> bool:
        """Whether it may leave some out, for what they cost."""
        return self.planned and self.costs is not None

    @property
    def costs(self) -> SpsTable | None:
        """The SPS table of either form."""
        return self.additive_costs if self.step_costs is None else self.step_costs

    @property
    def rules(self) -> VerifyRules:
        """The planner's; only where lengths are ``planned``."""
        return VerifyRules(gamma=len(self.temperatures))


def with_environment(config: "EngineConfig") -> "EngineConfig":
    """The configuration with the mode that the environment asks for, where no flag does."""
    text = os.environ.get(VARIABLE)
    if text is None or config.speculative_algorithm is None:
        return config
    if config.speculative_ragged_verify_mode is not None:
        return config
    for mode in get_args(RaggedMode):
        if text == mode:
            return msgspec.structs.replace(config, speculative_ragged_verify_mode=mode)
    raise ValueError(
        f"speculative_ragged_verify_mode: {VARIABLE} is {text!r}; must be one of "
        f"{', '.join(get_args(RaggedMode))} (in lower case), or unset"
    )


def refuse_ragged(config: "EngineConfig", spec: DrafterSpec) -> Refused | None:
    """What can be said of ragged verify before anything is read; tables have to be there in every
    mode, so that a typing error does not wait for the day that the mode changes.
    """
    tables = (
        (_SPS, config.speculative_dspark_sps_table_path),
        (_STS, config.speculative_dspark_confidence_sts_path),
    )
    if spec.plans_verify:
        for field, path in tables:
            if path is not None and not Path(path).exists():
                return Refused(field, f"{path} does not exist; name a table, or leave it out")
        return None
    align = config.speculative_dspark_align_verify_tokens_to_graph_tier or None
    for field, given in (*tables, (_ALIGN, align)):
        if given is not None:
            return Refused(
                field,
                f"belongs to drafters that give confidence, {spec.name} does not; leave it out",
            )
    if config.speculative_ragged_verify_mode == "cap-accept" and spec.host:
        return Refused(
            "speculative_ragged_verify_mode",
            f"cap-accept: {spec.name}'s drafts come from the host in the lengths that the length "
            "policy chose, so there is nothing beyond a cap; use static or compact",
            501,
        )
    return None


def read_ragged(
    config: "EngineConfig",
    spec: DrafterSpec | None,
    drafts: int,
    topk: int,
    sizes: tuple[int, ...] = (),
) -> RaggedVerify | Refused:
    """Resolve the mode and read its tables, for rows of up to ``drafts`` drafts; ``sizes``: of
    graphs (see ``RaggedVerify``)."""
    mode = config.speculative_ragged_verify_mode or "static"
    if spec is None or mode == "static" or not spec.plans_verify:
        return RaggedVerify(mode=mode)
    if topk > 1:
        return Refused(
            "speculative_ragged_verify_mode",
            f"{mode}: confidence plans the lengths of chains, and {spec.name} drafts trees (topk "
            f"{topk}); use static, or --speculative-eagle-topk 1",
        )
    field = _STS
    try:
        path = config.speculative_dspark_confidence_sts_path
        sts = identity_sts(drafts) if path is None else read_sts(path, drafts)
        field = _SPS
        path = config.speculative_dspark_sps_table_path
        costs = None if path is None else read_sps(path)
    except TableError as error:
        return Refused(field, str(error))
    return RaggedVerify(
        mode=mode,
        temperatures=sts.temperatures,
        step_costs=costs if isinstance(costs, StepTable) else None,
        additive_costs=costs if isinstance(costs, AdditiveTable) else None,
        align=mode == "compact" and config.speculative_dspark_align_verify_tokens_to_graph_tier,
        sizes=sizes,
    )


class OwnSts(NamedTuple):
    """The configuration with a draft's own temperatures, and what to tell of those of no use."""

    config: "EngineConfig"
    notes: tuple[str, ...] = ()


def own_sts(config: "EngineConfig", folder: Path, drafts: int) -> OwnSts:
    """Take the STS table of a draft's ``folder``, if it has one and no flag names another.

    A table of blocks that are not ``drafts`` long is left alone. Raises TableError for one that
    cannot be read.
    """
    path = folder / STS_FILE
    if config.speculative_dspark_confidence_sts_path is not None or not path.exists():
        return OwnSts(config)
    table = decode_table(str(path), read_bytes(str(path)), StsTable)
    if table.gamma != drafts:
        note = (
            f"{path}: has temperatures of {table.gamma} draft positions, not of {drafts}, and is "
            "ignored: confidence is not calibrated"
        )
        return OwnSts(config, (note,))
    taken = msgspec.structs.replace(config, speculative_dspark_confidence_sts_path=str(path))
    return OwnSts(taken)


def ragged_notes(config: "EngineConfig", ragged: RaggedVerify, device: str) -> list[str]:
    """What to tell the user of flags that change nothing."""
    notes = []
    static = ragged.mode == "static"
    if static and config.speculative_dspark_sps_table_path is not None:
        notes.append(f"{_SPS}: no use in mode static, which verifies every draft")
    if static and config.speculative_dspark_confidence_sts_path is not None:
        notes.append(f"{_STS}: ignored in mode static, which asks for no confidence")
    if config.speculative_dspark_align_verify_tokens_to_graph_tier:
        if ragged.mode != "compact":
            notes.append(f"{_ALIGN}: no use in mode {ragged.mode}, only in compact")
        elif device == "cpu":
            notes.append(f"{_ALIGN}: no use on a CPU, where steps run in their exact size")
    if ragged.planned and ragged.costs is None:
        notes.append(
            f"{_SPS}: is unset, so every draft counts as free and is verified; measure a table "
            "with `outrider profile sps`"
        )
    return notes
