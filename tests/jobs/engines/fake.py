"""A server that speaks as much of SGLang's or vLLM's HTTP as the adapters ask, and fails on demand.

    python fake.py -m sglang.launch_server --port 0 --model-path T [--speculative-num-steps 3 …]

It says t + 1 behind t. Drafted with, its drafter is wrong where 0, 5, 10, … would be right. So behind a
prompt that ends in 4, 9, 14, … the first token is a multiple of 5, and in chains of 3 steps the
verifications give 4, 1, 4, 1, … tokens: 3 and 0 drafts accepted in turn, 2.5 tokens a verification.

With SGLANG_SIMULATE_ACC_LEN=n every verification gives n tokens, all of them SIMULATED.

Started with --enable-return-hidden-states it answers a request for states out of the file STATES: what
/generate's meta_info is to hold, by the prompt, one of a list at a time, the last one again and again;
null there ends the server, and output_ids there are its answer. Asked for log-probabilities of the
prompt, it finds t + 1 likeliest behind t.

A drafter whose folder has the name POOR is never right.

What it does wrong is named by FAULT in its environment; prompts that start with VICTIM meet it where it
is of a request. With FAULTS_OF=drafted only a server with a drafter does it, with another word one whose
drafter's folder has that name, and with FAULTS_OF=simulated one that simulates.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULT, FAULTS_OF, STATES = "FAKE_FAULT", "FAKE_FAULTS_OF", "FAKE_STATES"
POOR = "FAKE_POOR"
IMPORTS = "FAKE_IMPORTS"
VICTIM = 7
WRONG_EVERY = 5
SIMULATED = 100
GAP = 0.25  # nats between its two likeliest tokens, whatever was said before
WENT_APART = 2  # the token of an answer that differs
LAG_S = 0.15  # until a lagging counter counts
LATER_S = 0.6  # until it is found that the core has died


class State:
    """What the server was started with, and what it counts."""

    def __init__(self, engine: str, options: argparse.Namespace) -> None:
        self.engine, self.options, self.lock = engine, options, threading.Lock()
        spec = json.loads(options.speculative_config or "{}")
        self.steps = options.speculative_num_steps or spec.get("num_speculative_tokens")
        self.drafter = options.speculative_draft_model_path or spec.get("model")
        of = os.environ.get(FAULTS_OF)
        told = os.environ.get("SGLANG_SIMULATE_ACC_LEN") if self.drafter else None
        kinds = {None}
        if self.drafter:
            kinds |= {"drafted", Path(self.drafter).name, *(["simulated"] if told else [])}
        self.fault = os.environ.get(FAULT) if of in kinds else None
        self.simulated = int(told) if told and self.fault != "does_not_simulate" else None
        self.poor = bool(self.drafter) and Path(self.drafter).name == os.environ.get(POOR)
        self.asked = 0
        file = os.environ.get(STATES)
        self.states: dict[str, list[Any]] = json.loads(Path(file).read_text()) if file else {}
        self.keys: set[str | None] = {None}  # of the cache of prefixes, that were asked for
        self.counted = {"rounds": 0, "accepted": 0, "tokens": 0, "requests": 0}
        self.stood = [0] * (self.steps or 0)

    def count(self, tokens: int, walk: list[int]) -> None:
        """Take in a request, of whose verifications each accepted so many drafts."""
        with self.lock:
            self.counted["rounds"] += len(walk)
            self.counted["accepted"] += sum(walk)
            self.counted["tokens"] += tokens
            self.counted["requests"] += 2 if self.fault == "foreign" else 1
            for j in range(len(self.stood)):
                self.stood[j] += sum(accepted > j for accepted in walk)


def walked(last: int, tokens: int, steps: int) -> list[int]:
    """Drafts accepted in each verification, until there are `tokens` behind `last`."""
    at, given, found = last + 1, 1, []
    while given < tokens:
        accepted = 0
        while accepted < steps and (at + 1 + accepted) % WRONG_EVERY:
            accepted += 1
        found.append(accepted)
        at, given = at + accepted + 1, given + accepted + 1
    return found


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: the log is for what a test looks for."""

    def do_GET(self) -> None:
        state, options = self.state, self.state.options
        sglang = state.engine == "sglang"
        model = "/models/other" if state.fault == "other_model" else options.model
        if state.fault == "never_ready" and self.path in ("/health_generate", "/health"):
            self.say("still loading", 503)
        elif self.path == "/v1/models":
            card = {"id": model, "root": model, "max_model_len": 1024}
            self.say(json.dumps({"data": [card]}))
        elif self.path == "/health" or (self.path == "/health_generate" and sglang):
            self.say("")
        elif self.path == "/version" and not sglang:
            self.say(json.dumps({"version": "0.32.0"}))
        elif self.path == "/server_info" and sglang:
            said = {
                "version": options.version,
                "model_path": model,
                "speculative_algorithm": options.speculative_algorithm,
                "speculative_draft_model_path": state.drafter,
                "speculative_num_steps": options.speculative_num_steps,
                "speculative_eagle_topk": options.speculative_eagle_topk,
                "speculative_num_draft_tokens": options.speculative_num_draft_tokens,
                "enable_return_hidden_states": options.enable_return_hidden_states,
                "return_hidden_states_mode": options.return_hidden_states_mode,
                "aux_hidden_state_capture": "eagle3" if options.aux else None,
                "return_aux_hidden_state_layer_ids": options.aux_ids,
                "chunked_prefill_size": options.chunked_prefill_size,
                "preferred_sampling_params": options.preferred_sampling_params,
                "dtype": options.dtype,
                "internal_states": [{"avg_spec_accept_length": 2.6 if state.drafter else None}],
            }
            self.say(json.dumps(said))
        elif self.path == "/metrics" and state.fault != "no_metrics":
            self.say("\n".join(self.metrics()) + "\n")
        else:
            self.say("not found", 404)

    def metrics(self) -> list[str]:
        """The counters as each engine names them."""
        state, labels = self.state, 'engine="0",model_name="m"'
        with state.lock:
            counted, stood = dict(state.counted), list(state.stood)
        if state.engine == "sglang":
            names = {
                "sglang:num_requests_total": counted["requests"],
                "sglang:generation_tokens_total": counted["tokens"],
            }
            if counted["rounds"]:
                names["sglang:spec_verify_calls_total"] = counted["rounds"]
            return [
                f"# TYPE {name[:-6]} counter\n{name}{{{labels}}} {n:.1f}"
                for name, n in names.items()
            ]
        # By reason, and two of them: the adapter has to add them up.
        lines = [
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {counted["requests"]}.0',
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 0.0',
            f"vllm:generation_tokens_total{{{labels}}} {counted['tokens']}.0",
        ]
        if state.drafter:
            spec = "vllm:spec_decode_num_"
            drafted = counted["rounds"] * (state.steps or 0)
            lines += [
                f"{spec}drafts_total{{{labels}}} {counted['rounds']}.0",
                f"{spec}draft_tokens_total{{{labels}}} {drafted}.0",
                f"{spec}accepted_tokens_total{{{labels}}} {counted['accepted']}.0",
                *(
                    f'{spec}accepted_tokens_per_pos_total{{{labels},position="{j}"}} {n}.0'
                    for j, n in enumerate(stood)
                ),
            ]
        return lines

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache":
            if self.state.fault == "unflushable":
                self.say("Flush cache failed.", 400)
            else:
                self.say("Cache flushed.")
        elif self.path == "/generate" and body.get("return_hidden_states"):
            self.with_states(body)
        elif self.path == "/generate" and body.get("return_logprob"):
            top = [[-0.5, 1, None], [-0.5 - GAP, 2, None]]
            self.say(json.dumps({"meta_info": {"output_top_logprobs": [top]}}))
        elif self.path == "/v1/completions" and body.get("logprobs"):
            by_token = {"b": -0.5 - GAP, "a": -0.5, "c": -9.0}
            self.say(json.dumps({"choices": [{"logprobs": {"top_logprobs": [by_token]}}]}))
        elif self.path == "/generate":
            params = body["sampling_params"]
            self.generate(body["input_ids"], params["max_new_tokens"])
        elif self.path == "/v1/completions":
            self.generate(body["prompt"], body["max_tokens"])
        else:
            self.say("not found", 404)

    def with_states(self, body: dict[str, Any]) -> None:
        """A whole answer with states; of a prompt that is asked again under its key, the last row's."""
        state, ids = self.state, body["input_ids"]
        if not (state.options.enable_return_hidden_states or state.options.aux):
            self.say("The server is not configured to return hidden states.", 400)
            return
        takes = state.states[",".join(map(str, ids))]
        take = takes.pop(0) if len(takes) > 1 else takes[0]
        if take is None:
            die()
        key = body.get("extra_key")
        if key in state.keys:
            block, *others = take["hidden_states"]
            take = {"hidden_states": [block[-1:], *others], "cached_tokens": len(ids) - 1}
        state.keys.add(key)
        tokens = body["sampling_params"]["max_new_tokens"]
        if body.get("return_logprob"):
            if state.fault == "no_logprobs_now":
                self.say("the scheduler is busy", 503)
                return
            if state.fault == "no_logprobs":
                self.say("log-probabilities of a prompt are not supported here", 400)
                return
            behind = [None, *([[-0.5, i + 1, None]] for i in ids[:-1])]
            take = {"input_top_logprobs": behind, **take}
        meta = {"prompt_tokens": len(ids), "completion_tokens": tokens, **take}
        output = meta.pop("output_ids", None) or [ids[-1] + 1 + i for i in range(tokens)]
        self.say(json.dumps({"output_ids": output, "meta_info": meta}))

    def generate(self, ids: list[int], tokens: int) -> None:
        """A stream of what the target says, a verification an event."""
        state = self.state
        fault = state.fault if ids[0] == VICTIM else None
        if fault == "dies_later":  # as vLLM, whose core has died
            self.say("EngineCore encountered an issue. See stack trace (above).", 500)
            threading.Timer(LATER_S, die).start()
            return
        if state.fault == "stalls" and fault is None:
            time.sleep(600)
        if fault == "stalls":
            time.sleep(LATER_S)
        if fault in ("refuses", "stalls"):
            self.say(json.dumps({"error": {"message": "the prompt is too long"}}), 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if fault == "dies":
            die()
        if fault == "hangs":
            time.sleep(600)
        if fault == "cut":  # as where its context ends
            tokens -= 1
        walk = walked(ids[-1], tokens, state.steps) if state.steps else []
        if state.poor:
            walk = [0] * (tokens - 1)
        if state.simulated is not None:
            walk = [state.simulated - 1] * -(-(tokens - 1) // state.simulated)
        # A verification may give more than is asked for, which is counted, but not sent.
        gains = [1, *(n + 1 for n in walk)] if state.steps else [1] * tokens
        output: list[int] = []
        for gain in gains:
            new = [ids[-1] + 1 + len(output) + i for i in range(gain)][: tokens - len(output)]
            if state.simulated is not None:
                new = [SIMULATED] * len(new)
            if fault == "differs" and len(output) <= WENT_APART < len(output) + len(new):
                new[WENT_APART - len(output)] = SIMULATED
            output += new
            self.event(ids, output, new, walk, fault, last=len(output) == tokens)
        if state.fault == "lags":
            threading.Timer(LAG_S, state.count, (tokens, walk)).start()
        elif state.fault != "never_counts":
            state.count(tokens, walk)
        if state.engine == "vllm":
            usage = {
                "prompt_tokens": len(ids),
                "completion_tokens": tokens - (fault == "miscounts"),
            }
            self.send({"choices": [], **({} if fault == "no_usage" else {"usage": usage})})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(
        self,
        ids: list[int],
        output: list[int],
        new: list[int],
        walk: list[int],
        fault: str | None,
        *,
        last: bool,
    ) -> None:
        """One event, as SGLang (all tokens so far) or vLLM (new ones) makes it."""
        if self.state.engine == "vllm":
            choice: dict[str, Any] = {"text": "", "token_ids": new}
            if fault == "no_ids":
                del choice["token_ids"]
            self.send({"choices": [choice]})
            return
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(output) - (last and fault == "miscounts"),
            "finish_reason": {"type": "length"} if last else None,
        }
        if last and fault == "aborts":
            meta["finish_reason"] = {"type": "abort", "message": "out of memory for its cache"}
        if last and walk:
            steps = self.state.steps or 0
            meta |= {
                "spec_verify_ct": len(walk),
                "spec_num_correct_drafts": sum(walk),
                "spec_num_proposed_drafts": len(walk) * steps,
                "spec_correct_drafts_histogram": [walk.count(n) for n in range(steps + 1)],
                "spec_accept_length": len(output) / len(walk),
            }
        said = new if os.environ.get("FAKE_NEW_ONLY") else output
        self.send({"meta_info": meta, **({} if fault == "no_ids" else {"output_ids": said})})

    def send(self, event: dict[str, Any]) -> None:
        """One event of a stream."""
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def say(self, text: str, status: int = 200) -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def die() -> None:
    """As an engine does whose drafter cannot be run: the reason, then what follows from it."""
    sys.stderr.write(
        "Traceback (most recent call last):\n"
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x256 and 384x128)\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    sys.stderr.flush()
    os._exit(3)


def main(arguments: list[str]) -> None:
    """Serve until killed; the port is the first line said."""
    if arguments[0] == "-I":  # in an interpreter's place it is asked for its release
        sys.stdout.write("0.5.23\n" if "sglang" in arguments else "0.32.0\n")
        return
    if arguments[0] == "-c":  # or for something else, which an interpreter knows
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1])
        return
    if module := os.environ.get(IMPORTS):  # as an engine imports the target's class
        importlib.import_module(module)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", dest="module", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", "--model-path", required=True)
    for flag in ("algorithm", "draft-model-path", "config"):
        parser.add_argument(f"--speculative-{flag}")
    for flag in ("num-steps", "eagle-topk", "num-draft-tokens"):
        parser.add_argument(f"--speculative-{flag}", type=int)
    parser.add_argument("--enable-return-hidden-states", action="store_true")
    parser.add_argument("--return-hidden-states-mode")
    parser.add_argument("--enable-return-aux-hidden-states", dest="aux", action="store_true")
    parser.add_argument("--return-aux-hidden-state-layer-ids", dest="aux_ids", type=int, nargs="+")
    parser.add_argument("--chunked-prefill-size", type=int)
    parser.add_argument("--preferred-sampling-params")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--version", default="0.5.23")
    options, _ = parser.parse_known_args(arguments)
    state = State(options.module.partition(".")[0], options)
    if state.fault == "dies_at_start":
        die()
    kind = type("Asked", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", options.port), kind)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
