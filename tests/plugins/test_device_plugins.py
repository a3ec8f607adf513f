"""Drafters on the device from another package: run end to end, checked, and refused when broken."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.speculative.checked_drafter import CheckedDrafter, check_drafts, check_law
from outrider.engine.speculative.device_drafter import DraftRows
from outrider.engine.speculative.draft_law import DraftLaw
from outrider.engine.step import StepRunner
from outrider.engine_core.capabilities import plugins_text
from outrider.engine_core.config import EngineConfig, refuse_config
from outrider.engine_core.drafter_spec import DrafterSpec, find_drafter, known_drafters
from outrider.engine_core.messages import RequestOutput
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.engine_core.sampling_params import SamplingParams

from ..engine.cores import drive, request, running_engine, tiny_config, tokens_of
from ..engine.joint_law import LEAST_P, behind_the_first, draw, folder_of, joint_of, p_value
from ..engine.tiny import write_checkpoint

PACKAGE = Path(__file__).parent / "device_drafters"
PROMPTS = {f"r{i}": [(7 * i + j * j) % 90 for j in range(5 + 9 * i)] for i in range(4)}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose module the test writes."""
    info = tmp_path / "broken_device-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-device\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[outrider.drafters]\nBROKEN = broken_device:SPEC\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "broken_device.py"
    sys.modules.pop("broken_device", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 97)


def config_of(model: Path, algorithm: str | None, **fields: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(model),
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 3,
        "skip_tokenizer_init": True,
        "speculative_algorithm": algorithm,
        "speculative_length_policy": "auto" if algorithm is None else "fixed",
        **fields,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def run(
    model: Path, algorithm: str | None, **fields: object
) -> tuple[dict[str, list[int]], list[RequestOutput], CheckedDrafter | None]:
    """Tokens, last outputs, and the drafter."""
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    requests = [request(rid, tokens, params) for rid, tokens in PROMPTS.items()]
    with running_engine(config_of(model, algorithm, **fields)) as engine:
        outputs = drive(engine.core, requests)
        runner: StepRunner = engine.worker._runner  # type: ignore[attr-defined]
        drafts = runner._drafts
    drafter = None if drafts is None else drafts.drafter
    assert drafter is None or isinstance(drafter, CheckedDrafter)
    return (
        {rid: tokens_of(some) for rid, some in outputs.items()},
        [some[-1] for some in outputs.values()],
        drafter,
    )


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("algorithm", ["FOLLOW", "lens"])
@pytest.mark.parametrize("mode", [{}, {"page_size": 1, "chunked_prefill_size": 7}], ids=str)
def test_the_output_is_that_of_plain_decoding(
    model: Path, algorithm: str, mode: dict[str, object]
) -> None:
    plain, _, nothing = run(model, None, **mode)
    drafted, last, drafter = run(model, algorithm, **mode)
    assert nothing is None
    assert drafter is not None
    assert drafted == plain
    stats = [output.stats for output in last if output.stats is not None]
    assert sum(s.proposed_drafts for s in stats) > 50
    if algorithm == "FOLLOW":  # what is proposed is right where the text repeats
        assert sum(s.correct_drafts for s in stats) > 0


@pytest.mark.usefixtures("plugin")
def test_features_are_those_of_the_newest_token(model: Path) -> None:
    _, _, checked = run(model, "LENS")
    assert checked is not None
    drafter = checked._drafter
    used = drafter.newest > 0  # type: ignore[attr-defined]
    assert int(used.sum()) >= 2
    first = drafter.siblings[:, 0]  # type: ignore[attr-defined]
    assert torch.equal(first[used], drafter.newest[used])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("plugin")
def test_plug_ins_show_among_the_capabilities() -> None:
    added = [(drafter.name, drafter.package) for drafter in known_drafters() if drafter.package]
    assert added == [(name, "device-drafters") for name in ("DICE", "FOLLOW", "GUESS", "LENS")]
    assert "- LENS (device-drafters)" in plugins_text()


def test_reserved_names_cannot_be_taken_on_the_device_either(broken: Path) -> None:
    info = broken.parent / "broken_device-0.1.dist-info" / "entry_points.txt"
    info.write_text("[outrider.drafters]\nEagle3 = broken_device:SPEC\n")
    broken.write_text(HEAD + SPEC.format(""))
    found = find_drafter("EAGLE3")
    assert isinstance(found, Refused)
    assert "takes the reserved name EAGLE3" in found.reason


@pytest.mark.usefixtures("plugin")
def test_several_ranks_are_refused(model: Path) -> None:
    refused = refuse_config(config_of(model, "FOLLOW", tp_size=2))
    assert refused is not None
    assert (refused.field, refused.status) == ("tp_size", 501)


HEAD = "from outrider.engine_core.drafter_spec import DraftKV, DrafterSpec\n"
SPEC = 'SPEC = DrafterSpec(name="BROKEN", implementation="broken_device:make"{})\n'
DRAFTER = """
class Drafter:
    feature_layers = {layers}
    def enter(self, init): pass
    def propose(self, rows): {propose}
    def align(self, verdict): pass
    def reset(self): pass
def make(context): return Drafter()
"""


@pytest.mark.usefixtures("plugin")
def test_drawn_drafts_of_a_plugin_keep_the_targets_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CHECK", "0")
    folder = folder_of(tmp_path, 6)
    config = tiny_config(
        folder, "DICE", speculative_use_rejection_sampling=True, max_running_requests=256,
        max_total_tokens=16384,
    )  # fmt: skip
    with running_engine(config) as engine:
        found = Counter(tokens[1:] for tokens in draw(engine.core, 4))
        stats = engine.core.stats(0)
    assert 1.2 * stats.spec_accepted_tokens < stats.spec_draft_tokens
    assert stats.spec_accepted_tokens > 1_000
    assert p_value(behind_the_first(joint_of(folder, 6, 4)), found) > LEAST_P


@pytest.mark.usefixtures("plugin")
def test_a_plugin_without_probabilities_has_no_rejection_sampling(model: Path) -> None:
    for algorithm in ("FOLLOW", "LENS"):
        config = config_of(model, algorithm, speculative_use_rejection_sampling=True)
        refused = refuse_config(config)
        assert refused is not None
        assert refused.field == "speculative_use_rejection_sampling"
        assert algorithm in refused.reason


def test_a_law_that_does_not_fit_its_drafts_is_an_error() -> None:
    lens, chosen = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    rows = DraftRows(lens, chosen, lens, lens, lens, lens, lens, lens)
    good = torch.zeros(3, 2, 5)
    ids = torch.zeros(7, dtype=torch.int32)
    assert check_law(DraftLaw(good, None), rows, 5).logits is good
    assert check_law(DraftLaw(good, ids), rows, 7).draft_ids is ids
    with pytest.raises(TypeError, match="asks for a DraftLaw, not NoneType"):
        check_law(None, rows, 5)
    for law, words in (
        (DraftLaw(good[:, :1], None), r"\[levels, 2, ids\]"),
        (DraftLaw(good.long(), None), "contiguous floats"),
        (DraftLaw(good.transpose(0, 1)[:2, :2], None), "contiguous floats"),
        (DraftLaw(good, None), "5 columns for 7"),
        (DraftLaw(good, ids.long()), r"int32\[7\]"),
    ):
        with pytest.raises(ValueError, match=words):
            check_law(law, rows, 7)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (", draft_kv=DraftKV.SHARED_SLOTS", "only the engine's own draft models have a KV pool"),
        (", draft_kv=DraftKV.READS_TARGET", "keep state by slot"),
        (", host=True, fills='broken_device:make'", "on the host or on the device"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    broken: Path, fields: str, reason: str
) -> None:
    broken.write_text(HEAD + SPEC.format(fields))
    found = find_drafter("broken")
    assert isinstance(found, Refused)
    assert found.status == 501
    assert "BROKEN = broken_device:SPEC of broken-device" in found.reason
    assert reason in found.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "cannot be imported: AttributeError"),
        ("make = 5", "is not a function of (context)"),
        ("def make(context): raise OSError('no table')", "failed: OSError: no table"),
        ("def make(context): return object()", "made object, which is no DeviceDrafter"),
        (DRAFTER.format(layers="(1, 1)", propose="pass"), "feature_layers (1, 1)"),
        (DRAFTER.format(layers="(0, 99)", propose="pass"), "from 0 to 2"),
        (DRAFTER.format(layers="[0]", propose="pass"), "feature_layers [0]"),
    ],
)
def test_a_broken_maker_is_refused_at_the_start(
    model: Path, broken: Path, code: str, reason: str
) -> None:
    broken.write_text(HEAD + SPEC.format("") + code)
    with (
        pytest.raises(RefusedError, match="BROKEN: broken_device:make") as error,
        running_engine(config_of(model, "BROKEN")),
    ):
        pass
    assert error.value.refused.field == "speculative_algorithm"
    assert reason in error.value.refused.reason


UNSOUND = {
    "outside the vocabulary": "rows.tokens.fill_(10**6); rows.proposed.copy_(rows.caps)",
    "below zero": "rows.tokens.fill_(-5); rows.proposed.copy_(rows.caps)",
    "before its parent": "rows.parents.fill_(60); rows.proposed.copy_(rows.caps)",
    "more than asked for": "rows.proposed.fill_(50)",
    "nothing at all": "pass",
}


@pytest.mark.parametrize("propose", UNSOUND.values(), ids=list(UNSOUND))
def test_what_is_not_sound_is_never_verified(model: Path, broken: Path, propose: str) -> None:
    broken.write_text(HEAD + SPEC.format("") + DRAFTER.format(layers="None", propose=propose))
    plain, _, _ = run(model, None)
    drafted, _, _ = run(model, "BROKEN")
    assert drafted == plain


def rows_of(
    caps: list[int], tokens: list[int], parents: list[int], proposed: list[int]
) -> DraftRows:
    cu = [0]
    for cap in caps:
        cu.append(cu[-1] + cap + 1)
    made = (caps, [0, *cu[1:]], caps, [0] * 9, tokens, parents, proposed, [99] * len(caps))
    tensors = (torch.tensor(values, dtype=torch.int32) for values in made)
    return DraftRows._make((*tensors, None))


def test_sound_trees_pass_with_their_depth() -> None:
    rows = rows_of([4, 2], [9, 1, 2, 3, 4, 9, 5, 6], [-1, 0, 0, 1, 3, -1, 0, 0], [4, 1])
    check_drafts(rows, 10, tree=True)
    assert rows.proposed.tolist() == [4, 1]
    assert rows.depths.tolist() == [3, 1]
    assert rows.tokens.tolist() == [9, 1, 2, 3, 4, 9, 5, 0]  # the place not proposed is padding
    assert rows.parents.tolist() == [-1, 0, 0, 1, 3, -1, 0, -1]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([9, 1, 10], [-1, 0, 1]), ([9, -1, 2], [-1, 0, 1]), ([9, 1, 2], [-1, 0, 0])],
    ids=["outside", "negative", "a branch of a chain"],
)
def test_one_fault_takes_the_row_and_no_other(tokens: list[int], parents: list[int]) -> None:
    rows = rows_of([2, 2], [*tokens, 9, 1, 2], [*parents, -1, 0, 1], [2, 2])
    check_drafts(rows, 10, tree=False)
    assert rows.proposed.tolist() == rows.depths.tolist() == [0, 2]
    assert rows.tokens.tolist() == [9, 0, 0, 9, 1, 2]
    assert rows.parents.tolist() == [-1, -1, -1, -1, 0, 1]


def test_a_declaration_names_no_layers() -> None:
    with pytest.raises(TypeError, match="target_layers"):
        DrafterSpec(name="X", implementation="m:f", target_layers=(1,))  # type: ignore[call-arg]
