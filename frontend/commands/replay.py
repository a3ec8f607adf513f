"""``outrider replay``: run a recorded trace again and compare every plan, token and commit."""

import argparse

from ..errors import OutriderError


def main(args: list[str]) -> int:
    """Replay a trace; status 1 if anything differs."""
    parser = argparse.ArgumentParser(
        prog="outrider replay",
        description="Replay a trace that OUTRIDER_TRACE=FILE recorded: the core from arrivals and "
        "results, then the model from the plans.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="FILE")
    parser.add_argument("--core-only", action="store_true", help="do not run the model again")
    namespace = parser.parse_args(args)

    from ...engine_core.assembly import assemble_replay
    from ...engine_core.refusal import RefusedError
    from ...engine_core.replay import ReplayReport, replay_core
    from ...engine_core.trace import TraceError, TraceReader
    from ..launch import replay_on_model

    def replay_on_core(path: str) -> ReplayReport:
        return replay_core(TraceReader(path), assemble_replay)

    try:
        parts = [("core", replay_on_core)]
        if not namespace.core_only:
            parts.append(("model", replay_on_model))
        same = True
        for name, replay in parts:
            report = replay(namespace.trace)
            same = same and report.ok
            outcome = "all the same" if report.ok else f"{len(report.differences)} differences"
            print(f"{name}: {report.steps} steps replayed, {outcome}")
            for difference in report.differences:
                print(f"  {difference}")
        return 0 if same else 1
    except RefusedError:
        raise
    except (TraceError, ValueError) as error:  # the file, or a tokenizer that is gone
        raise OutriderError(str(error)) from None
