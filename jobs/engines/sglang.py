"""SGLang: its flags, its routes and its counters (0.5.23; read there and run)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.engines.engine import Wanted, arguments
from jobs.engines.metrics_text import totals
from jobs.engines.records import Answered, Counters, Facts, Request, Returned
from jobs.engines.talk import (
    Address,
    Deadline,
    ServerError,
    get,
    get_json,
    parsed,
    post,
    stream,
)

# What is not kept of /server_info: figures since the start, and what may hold a secret.
HIDDEN = re.compile(
    r"internal_states|launch_command|key|secret|token$|password|auth", re.IGNORECASE
)
IDLE_S = 20.0  # from a request's last token to an idle scheduler
PAUSE_S = 0.05
INPUT_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
OWN = (
    "model_path",
    "host",
    "port",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


class SGLang:
    """The adapter."""

    name = "sglang"

    def command(self, wanted: Wanted) -> list[str]:
        """`python -m sglang.launch_server …`."""
        own: dict[str, Any] = {
            "model_path": wanted.target,
            "host": "127.0.0.1",
            "port": wanted.port,
            "enable_metrics": True,
        }
        if (draft := wanted.draft) is not None:
            own |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": draft.folder,
                # All three or none: what is left out is guessed by the target's class.
                "speculative_num_steps": draft.steps,
                "speculative_eagle_topk": draft.topk,
                "speculative_num_draft_tokens": draft.verified,
            }
        flags = arguments(own, wanted.flags, OWN)
        return [wanted.python, "-m", "sglang.launch_server", *flags]

    def lacking(self, address: Address) -> str | None:
        """The models, then its health, which a drafter that cannot be run does not touch."""
        for path, seconds in (("/v1/models", 5.0), ("/health_generate", 60.0)):
            try:
                get(address, path, seconds)
            except ServerError as error:
                return str(error)
        return None

    def facts(self, address: Address) -> Facts:
        """Of /server_info, which holds every argument as in effect."""
        said = get_json(address, "/server_info")
        states = said.get("internal_states") or [{}]
        state = states[0] if isinstance(states[0], Mapping) else {}
        return Facts(
            engine=self.name,
            version=said.get("version"),
            model=said.get("model_path"),
            drafter=said.get("speculative_draft_model_path"),
            flags={k: v for k, v in said.items() if is_plain(v) and not HIDDEN.search(k)},
            printed_accept_length=state.get("avg_spec_accept_length"),
        )

    def counters(self, address: Address) -> Counters:
        """Of /metrics, where the server was started with --enable-metrics."""
        try:
            text = get(address, "/metrics")
        except ServerError as error:
            if "answered 404" in str(error):
                return Counters()
            raise
        counted = totals(text)
        return Counters(
            rounds=counted.get("sglang:spec_verify_calls_total"),
            generated=counted.get("sglang:generation_tokens_total"),
            requests=counted.get("sglang:num_requests_total"),
        )

    def forget(self, address: Address) -> None:
        """The cache of prefixes, once the scheduler has let go of the last request."""
        deadline = Deadline(IDLE_S)
        while True:
            try:
                post(address, "/flush_cache", {}, 30.0)
            except ServerError:
                if deadline.over:
                    raise
                time.sleep(PAUSE_S)
            else:
                return

    def ask(self, address: Address, request: Request, began: float, *, alone: bool) -> Answered:
        """/generate, streamed; the counters of the request come with its last event."""
        del alone  # every request has counters of its own
        body = {
            "input_ids": list(request.prompt.ids),
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": request.prompt.new_tokens,
                "ignore_eos": request.ignore_eos,
            },
        }
        sent = time.perf_counter()
        first = last = None
        parts: list[list[int]] = []
        meta: Mapping[str, Any] = {}
        for came, event in stream(address, "/generate", body, request.seconds):
            meta = event.get("meta_info") or {}
            ids = event.get("output_ids")
            if ids is None:
                raise ServerError(f"{address.url}/generate gave no output_ids")
            if ids and first is None:
                first = came
            last = came
            parts.append(ids)
        if first is None or last is None:
            raise ServerError(
                f"{address.url}/generate gave no token for prompt {request.prompt.name}"
            )
        finish = meta.get("finish_reason")
        if isinstance(finish, Mapping) and finish.get("type") == "abort":
            raise ServerError(f"{address.url}/generate aborted: {finish.get('message')}")
        return Answered(
            prompt=request.prompt.name,
            prompt_tokens=int(meta["prompt_tokens"]),
            output=whole(parts, int(meta["completion_tokens"]), address),
            sent_s=sent - began,
            first_token_s=first - sent,
            latency_s=last - sent,
            rounds=meta.get("spec_verify_ct"),
            accepted=meta.get("spec_num_correct_drafts"),
            proposed=meta.get("spec_num_proposed_drafts"),
            histogram=histogram(meta.get("spec_correct_drafts_histogram")),
            printed_accept_length=meta.get("spec_accept_length"),
        )

    def top_two(self, address: Address, ids: Sequence[int], seconds: float) -> tuple[float, float]:
        """/generate of one token, with log-probabilities."""
        where = f"{address.url}/generate"
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "top_logprobs_num": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        said = parsed(post(address, "/generate", body, seconds), where)
        try:
            (one, *_), (other, *_) = said["meta_info"]["output_top_logprobs"][0]
            return float(one), float(other)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{where} gave no two output_top_logprobs") from error

    def states(
        self, address: Address, request: Request, key: str, *, choices: bool = False
    ) -> Returned:
        """/generate with the target's states, and with `choices` the likeliest token behind each of the
        prompt's; the server's cache is not asked under a new `key`.
        """
        where = f"{address.url}/generate"
        body = {
            "input_ids": list(request.prompt.ids),
            "return_hidden_states": True,
            "extra_key": key,
            **({**INPUT_LOGPROBS} if choices else {}),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": request.prompt.new_tokens,
                "ignore_eos": request.ignore_eos,
            },
        }
        said = parsed(post(address, "/generate", body, request.seconds), where)
        meta = said.get("meta_info") if isinstance(said, Mapping) else None
        ids = said.get("output_ids") if isinstance(said, Mapping) else None
        if not isinstance(meta, Mapping) or not isinstance(ids, list):
            raise ServerError(f"{where} gave no meta_info or no output_ids")
        finish = meta.get("finish_reason")
        if isinstance(finish, Mapping) and finish.get("type") == "abort":
            raise ServerError(f"{where} aborted: {finish.get('message')}")
        return Returned(
            output=tuple(ids),
            states=meta.get("hidden_states"),
            cached=int(meta.get("cached_tokens") or 0),
            likeliest=meta.get("input_top_logprobs"),
        )


def whole(parts: Sequence[Sequence[int]], count: int, address: Address) -> tuple[int, ...]:
    """All token ids of a stream, whose events hold all so far or, by a flag of the server, new ones."""
    if len(parts[-1]) == count:
        return tuple(parts[-1])
    joined = [token for part in parts for token in part]
    if len(joined) == count:
        return tuple(joined)
    raise ServerError(
        f"{address.url}/generate counts {count} tokens, but its events hold {len(parts[-1])} at the end "
        f"and {len(joined)} in all"
    )


def histogram(given: Any) -> tuple[int, ...] | None:
    """Rounds by accepted drafts; None where the release gives none."""
    return tuple(int(count) for count in given) if isinstance(given, list) and given else None


def is_plain(value: object) -> bool:
    """Whether it is a setting and no structure."""
    return value is None or isinstance(value, (str, int, float, bool, list, dict))
