"""The output folder when a command begins: what it may hold, and what it must."""

from pathlib import Path

from ...engine_core.refusal import Refused
from ...engine_core.train_spec import TrainSpec
from .checkpoint import FILE
from .export import CONFIG, WEIGHTS


def refuse_folders(spec: TrainSpec) -> Refused | None:
    """Why the run can neither begin nor go on there, if so; nothing is made or loaded."""
    for name in ("output", "on_policy_cache"):
        path = getattr(spec, name)
        if path is not None and Path(path).exists() and not Path(path).is_dir():
            return Refused(name, f"{path!r} is a file; give a folder")
    if spec.initial_draft is not None:
        for name in (CONFIG, WEIGHTS):
            if not (Path(spec.initial_draft) / name).is_file():
                reason = f"{spec.initial_draft!r} has no {name}; give a draft's folder"
                return Refused("initial_draft", reason)
    folder = Path(spec.output)
    state = folder / FILE
    if spec.resume:
        if not state.is_file():
            return Refused("resume", f"{str(state)!r} is not there; start without --resume")
        return None
    if state.exists():
        remedy = "go on with it by --resume, give another folder, or remove it"
        return Refused("output", f"{spec.output!r} holds a run that was begun before; {remedy}")
    if (folder / WEIGHTS).exists():
        remedy = "give another folder, or remove it"
        return Refused("output", f"{spec.output!r} holds a model already; {remedy}")
    return None


def make_folder(spec: TrainSpec) -> Refused | None:
    """Make it; why it cannot be made."""
    try:
        Path(spec.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{spec.output!r} cannot be made ({error.strerror}); give another folder"
        return Refused("output", reason)
    return None


def is_exported(folder: Path) -> bool:
    """Whether the draft there is of the state there, which is always saved before it."""
    state, weights = folder / FILE, folder / WEIGHTS
    return weights.is_file() and weights.stat().st_mtime_ns >= state.stat().st_mtime_ns
