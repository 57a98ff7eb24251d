"""vLLM: its flags, its routes and its counters (0.32.0; read there and run)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.engines.engine import Wanted, arguments
from jobs.engines.metrics_text import by_label, totals
from jobs.engines.records import Answered, Counters, Facts, Request
from jobs.engines.talk import Address, ServerError, get, get_json, parsed, post, stream

# The drafter's short flags would have the baseline draft as well.
OWN = (
    "model",
    "host",
    "port",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "enable_prefix_caching",
)
COUNTED_S = 5.0  # for the counters to take in a request that has ended
PAUSE_S = 0.01
SPEC = "vllm:spec_decode_num_"


class VLLM:
    """The adapter."""

    name = "vllm"

    def __init__(self) -> None:
        self._models: dict[Address, str] = {}

    def command(self, wanted: Wanted) -> list[str]:
        """`python -m vllm.entrypoints.openai.api_server …`."""
        own: dict[str, Any] = {
            "model": wanted.target,
            "host": "127.0.0.1",
            "port": wanted.port,
            # Its cache of prefixes cannot be emptied from outside, and prompts come again.
            "no_enable_prefix_caching": True,
        }
        if (draft := wanted.draft) is not None:
            own["speculative_config"] = {
                "method": "eagle3",
                "model": str(draft.folder),
                "num_speculative_tokens": draft.steps,
            }
        flags = arguments(own, wanted.flags, OWN)
        return [wanted.python, "-m", "vllm.entrypoints.openai.api_server", *flags]

    def lacking(self, address: Address) -> str | None:
        """The models, then its health."""
        for path in ("/v1/models", "/health"):
            try:
                get(address, path, 5.0)
            except ServerError as error:
                return str(error)
        return None

    def facts(self, address: Address) -> Facts:
        """Version and model; its arguments it does not tell."""
        (model, *_) = get_json(address, "/v1/models")["data"]
        return Facts(
            engine=self.name,
            version=get_json(address, "/version").get("version"),
            model=model.get("root") or model["id"],
            drafter=None,
            flags={"max_model_len": model.get("max_model_len"), "served_model_name": model["id"]},
        )

    def model(self, address: Address) -> str:
        """What it calls its model; asked once."""
        if address not in self._models:
            self._models[address] = get_json(address, "/v1/models")["data"][0]["id"]
        return self._models[address]

    def counters(self, address: Address) -> Counters:
        """Of /metrics; a server without a drafter has no rounds."""
        text = get(address, "/metrics")
        counted = totals(text)
        return Counters(
            rounds=counted.get(f"{SPEC}drafts_total"),
            accepted=counted.get(f"{SPEC}accepted_tokens_total"),
            proposed=counted.get(f"{SPEC}draft_tokens_total"),
            per_position=positions(
                by_label(text, f"{SPEC}accepted_tokens_per_pos_total", "position")
            ),
            generated=counted.get("vllm:generation_tokens_total"),
            requests=counted.get("vllm:request_success_total"),
        )

    def forget(self, address: Address) -> None:
        """There is nothing: the cache of prefixes is off."""

    def ask(self, address: Address, request: Request, began: float, *, alone: bool) -> Answered:
        """/v1/completions, streamed; its counters are the server's, so only those of one alone are."""
        before = self.counters(address) if alone else Counters()
        body = {
            "model": self.model(address),
            "prompt": list(request.prompt.ids),
            "max_tokens": request.prompt.new_tokens,
            "temperature": 0,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        sent = time.perf_counter()
        first = last = None
        output: list[int] = []
        usage: dict[str, Any] = {}
        for came, event in stream(address, "/v1/completions", body, request.seconds):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                if "token_ids" not in choice:
                    raise ServerError(f"{address.url}/v1/completions gave no token_ids")
                ids = choice["token_ids"] or []
                if ids:
                    first, last = first or came, came
                output += ids
        if first is None or last is None:
            raise ServerError(
                f"{address.url}/v1/completions gave no token for prompt {request.prompt.name}"
            )
        if not usage:
            raise ServerError(f"{address.url}/v1/completions gave no usage")
        if (counted := int(usage["completion_tokens"])) != len(output):
            raise ServerError(
                f"{address.url}/v1/completions counts {counted} tokens, but gave {len(output)}"
            )
        own = self._of_one(address, before) if alone else Counters()
        return Answered(
            prompt=request.prompt.name,
            prompt_tokens=int(usage["prompt_tokens"]),
            output=tuple(output),
            sent_s=sent - began,
            first_token_s=first - sent,
            latency_s=last - sent,
            rounds=own.rounds,
            accepted=own.accepted,
            proposed=own.proposed,
        )

    def top_two(self, address: Address, ids: Sequence[int], seconds: float) -> tuple[float, float]:
        """/v1/completions of one token, with log-probabilities."""
        where = f"{address.url}/v1/completions"
        body = {
            "model": self.model(address),
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 2,
        }
        said = parsed(post(address, "/v1/completions", body, seconds), where)
        try:
            given = said["choices"][0]["logprobs"]["top_logprobs"][0]
            one, other = sorted(map(float, given.values()), reverse=True)[:2]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{where} gave no two top_logprobs") from error
        return one, other

    def _of_one(self, address: Address, before: Counters) -> Counters:
        """What was counted for the one request that has just ended."""
        if before.rounds is None:
            return Counters()
        end = time.monotonic() + COUNTED_S
        while True:
            counted = self.counters(address).since(before)
            if counted.requests == 1:
                return counted
            if (counted.requests or 0) > 1:
                return (
                    Counters()
                )  # whose is whose cannot be told; the pass says that it was disturbed
            if time.monotonic() > end:
                raise ServerError(f"{address.url}/metrics does not count a request that has ended")
            time.sleep(PAUSE_S)


def positions(counted: Mapping[str, int]) -> tuple[int, ...]:
    """A counter by position, in the order of positions."""
    return tuple(counted[key] for key in sorted(counted, key=int))
