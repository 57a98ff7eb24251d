"""The end of a run: judge it, show it, file it. The exit code is computed from what is left on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import (
    Detached,
    HostUnreachable,
    OrchestratorError,
    StateUnknown,
    TrackingError,
)
from orchestrator.follow import Ended
from orchestrator.judge import Verdict, judge, metrics_of, not_answered, parse_predictions
from orchestrator.paths import RunPaths
from orchestrator.runs import failed_result, reference, why_not, write_json, write_patched
from orchestrator.session import Session
from orchestrator.tracking import Tracking, default_tracking, how_to_open


def conclude(
    session: Session, config: dict[str, Any], paths: RunPaths, ending: Callable[[], Ended]
) -> None:
    """Bring a run to its end by `ending`, judge it, show it and file it."""
    attach = f"python -m orchestrator attach {reference(paths.folder)}"
    try:
        with session.show.until_answered():
            answer(session, config, paths, ending)
    except Detached as error:
        if not config["detach"]:  # else it is what was asked for
            session.failed = session.cancelled = True
        session.show.line(f"detached  {error}", style="yellow")
        session.show.line(f"Take it up again with: {attach}")
        return
    except (HostUnreachable, StateUnknown) as error:
        # Never the same as a failed run: it may go on there, so nothing is judged.
        session.failed = True
        word = "unreachable" if isinstance(error, HostUnreachable) else "unknown"
        session.show.line(f"{word}  {error}", style="red")
        session.show.line(f"Take it up again with: {attach}")
        return
    except KeyboardInterrupt:
        session.show.line("interrupted before the job was known to be started", style="red")
        session.show.line(f"Whatever became of it: {attach}")
        raise
    except OSError as error:
        raise OrchestratorError(
            f"{error.filename or paths.folder} cannot be written ({error.strerror}); make room, then "
            f"take the run up again with: {attach}"
        ) from error
    file_run(session, tracking_of(config), Path(config["results"]), paths)


def answer(
    session: Session, config: dict[str, Any], paths: RunPaths, ending: Callable[[], Ended]
) -> None:
    """End a run, judge it and show it; its folder then holds the verdict."""
    try:
        ended = ending()
        verdict = judged(config, ended, paths)
    except (HostUnreachable, StateUnknown, Detached):
        raise
    except OrchestratorError as error:
        ended = Ended(state={}, result=failed_result(error))
        write_json(paths.result, ended.result)
        verdict = not_answered(str(error))
    write_json(paths.verdict, verdict.plain())
    patched = write_patched(paths, ended.result)
    session.cancelled = ended.state.get("state") == "cancelled"
    if ended.ok and ended.result is not None:
        session.show.answer(ended.result, verdict.plain())
        if patched:
            session.show.line(f"patched  {paths.patched.parent}: {patched_words(patched)}")
    else:
        session.show.not_answered(verdict.reason, paths.folder)


def patched_words(names: Sequence[str]) -> str:
    """What lies in a run's folder for a copy of the drafter, and how it is used."""
    programs = " and ".join(name for name in names if name != "config.json")
    said = ["config.json, to be put into a copy of the drafter"] * ("config.json" in names)
    if programs:
        said.append(f"{programs}, to be run on a copy of it: python PROGRAM.py COPY")
    return "; ".join(said)


def judged(config: dict[str, Any], ended: Ended, paths: RunPaths) -> Verdict:
    """The verdict on a run that has ended."""
    if not ended.ok:
        return not_answered(why_not(ended, paths))
    predictions = parse_predictions(config["predict"], metrics_of(config["job"]["name"]))
    return judge(predictions, (ended.result or {}).get("metrics", {}))


def file_run(
    session: Session, tracking: Tracking, results: Path, paths: RunPaths
) -> TrackingError | None:
    """File the run in MLflow; where that fails, why: its folder stays and can be filed later."""
    run = reference(paths.folder)
    from orchestrator.record import fill_run

    try:
        filed = fill_run(session.store(tracking, results).result(), paths.folder)
    except (TrackingError, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        session.show.line(f"not filed  run {paths.folder.name}: {reason}", style="red")
        session.show.line(
            f"The run is whole; file it (elsewhere with tracking.uri=URI): "
            f"python -m orchestrator record {run}"
        )
        session.cancelled |= isinstance(error, KeyboardInterrupt)
        return error if isinstance(error, TrackingError) else TrackingError(reason)
    write_json(paths.filed, {"uri": tracking.uri, "run": filed.mlflow_run_id})
    session.show.filed(
        f"MLflow run {filed.mlflow_run_id}; look at it with: {how_to_open(tracking)}"
    )
    return None


def tracking_of(config: dict[str, Any]) -> Tracking:
    """Where a config's runs are filed."""
    uri, experiment = config["tracking"]["uri"], config["tracking"]["experiment"]
    default = default_tracking(Path(config["results"]))
    if uri is None:
        return Tracking(uri=default.uri, experiment=experiment, artifact_root=default.artifact_root)
    return Tracking(uri=uri, experiment=experiment)
