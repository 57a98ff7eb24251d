"""The config's types: what an experiment may set, with what type.

Hydra merges the YAML files of conf/ into these dataclasses, so an unknown key or a wrong type is an
error before anything starts. Enums stand for every switch; `orchestrator.config` checks the raw YAML
as well, since the library would convert `off` to a bool and 1 to an enum.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from eagle3.layers import LayerConvention
from eagle3.wiring import (
    D2T,
    Biases,
    Concat,
    DecoderLayer,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Positions,
    Residual,
    RopeChoice,
    Rotation,
    Token,
    Window,
)
from orchestrator.paths import CLONE

# Hydra reads these annotations at run time: List and Optional are what OmegaConf 2.3 understands.


class Where(Enum):
    """Where an input lies: on the host already, or here, to be sent along."""

    host = "host"
    local = "local"


class TargetLayout(Enum):
    """What a target folder holds."""

    hf = "hf"  # a Hugging Face checkpoint
    lab = "lab"  # the lab's trained layers, laid out as a checkpoint on first use


class Truth(Enum):
    """What a drafted token is compared with; as eagle3.metrics.Truth, which needs torch."""

    target_argmax = "target_argmax"
    next_token = "next_token"
    stored_teacher = "stored_teacher"


class Metrics(Enum):
    """Whose figures a drafter test gives."""

    ours = "ours"
    specforge = "specforge"
    speculators = "speculators"


class DrafterLayout(Enum):
    """The ecosystem that wrote a drafter's checkpoint."""

    specforge = "specforge"  # EAGLE's too
    speculators = "speculators"


class DataLayout(Enum):
    """The ecosystem whose files captured samples are."""

    pt_shards = "pt_shards"  # row-sharded .pt, as capture_states and speculators v1 write them
    speculators = "speculators"
    speculators_v0 = "speculators_v0"
    specforge = "specforge"


class Damaged(Enum):
    """What becomes of sample files that cannot be used."""

    fail = "fail"
    skip = "skip"


class Device(Enum):
    """What a job computes on."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class EngineName(Enum):
    """The engines of which it is known what they make of a drafter."""

    sglang = "sglang"
    vllm = "vllm"
    tensorrt_llm = "tensorrt_llm"
    llama_cpp = "llama_cpp"


class Dtype(Enum):
    """The number type a target is run in; auto is its checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class WiringConfig:
    """How the drafter is tied to its target."""

    layers: list[int] = MISSING
    convention: LayerConvention = MISSING
    d2t: D2T = D2T.offset
    decoder_layer: DecoderLayer = DecoderLayer.included
    embedding: Embedding = Embedding.target
    head: Head = Head.own
    residual: Residual = Residual.declared
    window: Window = Window.declared
    concat: Concat = Concat.embedding_first
    input_norms: InputNorms = InputNorms.own
    fc_input: FcInput = FcInput.declared
    head_input: HeadInput = HeadInput.declared
    feedback: Feedback = Feedback.declared
    rope: RopeChoice = RopeChoice.declared
    rotation: Rotation = Rotation.half_split
    token: Token = Token.next
    positions: Positions = Positions.advancing
    deeper_norm: Parts = Parts.declared
    biases: Biases = Biases.declared
    qk_norm: Parts = Parts.declared


@dataclass
class TargetConfig:
    """The large model."""

    name: str = MISSING
    where: Where = Where.host
    path: str = MISSING
    layout: TargetLayout = TargetLayout.hf


@dataclass
class DrafterConfig:
    """The EAGLE-3 head."""

    name: str = MISSING
    where: Where = Where.host
    path: str = MISSING
    layout: DrafterLayout | None = None  # None: found by looking


@dataclass
class CaptureConfig:
    """How data is made from a target where it does not exist yet."""

    prompts: str = MISSING  # a local JSONL file: {"input_ids": […]} or {"text": "…"} a line
    states: list[int] = MISSING  # canonical
    new_tokens: int = MISSING  # greedy tokens behind each prompt; 0 captures the text as given
    repetition_window: int | None = None  # cut where this many tokens in a row come a second time
    min_new_tokens: int = 2  # a shorter continuation is left out
    batch: int = 32
    max_samples: int | None = None
    dtype: Dtype = Dtype.auto


@dataclass
class DataConfig:
    """Captured samples: a folder on the host, or how to make one."""

    name: str = MISSING
    where: Where = Where.host
    path: str | None = MISSING  # None where the data is made
    states: list[int] | None = None  # canonical states in the files' order, where no file says so
    layout: DataLayout | None = None  # None: found by looking
    damaged: Damaged = Damaged.fail
    target_argmax: str | None = None  # a folder on the host that capture_states made for this data
    capture: CaptureConfig | None = None


@dataclass
class EngineConfig:
    """The engine that serves the drafter, and what is known of it there."""

    name: EngineName | None = None  # None: no engine is asked about
    version: str | None = None
    engine_class: str | None = None  # the target's class there, such as kimi_k25
    checkout: str | None = None  # a folder on the host with the engine's source
    flags: dict[str, Any] = field(default_factory=dict)  # of the server
    ids: list[int] | None = None  # layer ids that it is given; None: what config.json says
    accept_length: float | None = None  # that it was seen to have
    python: str | None = None  # the interpreter on the host that has it; None: host.python
    env: dict[str, str] = field(default_factory=dict)  # for its servers, beside host.env
    # One's own command lines that start the servers; {port}, {model} and {drafter} are filled in.
    launch: list[str] | None = None
    baseline_launch: list[str] | None = None
    patch: str | None = None  # a local diff of its source, or embedding_capture; not the baseline's
    url: str | None = None  # a server of one's own, with the drafter: asked, and left running
    baseline_url: str | None = None  # one without


@dataclass
class HostConfig:
    """Where jobs run."""

    name: str = MISSING
    alias: str | None = MISSING  # what `ssh ALIAS` would take; None: this machine
    ssh_config: str | None = None  # as ssh -F; None: ssh's own files
    work: str = MISSING  # folder for snapshots, inputs and runs
    python: str = MISSING  # interpreter with torch and safetensors
    env: dict[str, str] = field(default_factory=dict)  # variables for jobs
    gpus: list[int] | None = None  # those that jobs may see; None: the freest one
    checkouts: list[str] = field(default_factory=list)  # engine checkouts whose commit is kept
    patience_s: float = 60.0  # how long a lost host is tried again


@dataclass
class TrackingConfig:
    """Where runs are filed."""

    uri: str | None = MISSING  # None: sqlite under `results`
    experiment: str = "drafters"


@dataclass
class TreeConfig:
    """Draft trees as SGLang builds them, beside the chains; None twice: no trees."""

    topk: int | None = None  # speculative-eagle-topk
    draft_tokens: int | None = None  # speculative-num-draft-tokens, the root included


@dataclass
class DrafterTestJob:
    """Score a drafter on captured states."""

    name: str = "drafter_test"
    steps: int = 4  # of a chain or a tree: speculative-num-steps
    truth: Truth = Truth.target_argmax
    metrics: list[Metrics] = field(default_factory=lambda: [Metrics.ours])
    tree: TreeConfig = field(default_factory=TreeConfig)
    ttt_steps: int | None = None  # how many steps the trainers unrolled; None: their defaults
    max_samples: int | None = None
    seed: int = 0  # of the bootstrap
    device: Device = Device.cpu
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class CaptureStatesJob:
    """Capture a target's states for prompts, or its own choices for a dump's texts."""

    name: str = "capture_states"
    out: str = MISSING  # a folder on the host that does not exist yet
    dtype: Dtype | None = None  # for a dump's texts (None: auto); prompts have data.capture.dtype
    request_s: float | None = None  # until engine.url must have answered a request (None: 300)
    device: Device = Device.cpu
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class InspectDataJob:
    """Measure what the slots of captured samples are."""

    name: str = "inspect_data"
    max_samples: int | None = None
    first_layers: int | None = (
        None  # of the target, run to find low slots; None: what fits, 0: none
    )
    seed: int = 0  # of the bootstrap
    device: Device = Device.cpu
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class AxesConfig:
    """What a search may vary; left alone it varies everything that the data can decide."""

    fixed: list[str] = field(default_factory=list)  # 'states' or switches of the wiring: not varied
    only: dict[str, list[str]] = field(default_factory=dict)  # a switch: the values to try
    states: list[list[int]] | None = None  # canonical, each in fc's order; None: every choice
    more_states: list[list[int]] = field(default_factory=list)  # to be tried beside every choice
    neighbours: bool = True  # states one off those that were found, where they can be had


@dataclass
class WiringSearchJob:
    """Find the wiring that a drafter was trained with, and on which teacher."""

    name: str = "wiring_search"
    steps: int = 4
    max_samples: int | None = None
    finalists: int = 8  # how many wirings are scored on all samples and ranked
    seed: int = 0  # of the bootstrap and of the order in which samples are taken
    axes: AxesConfig = field(default_factory=AxesConfig)
    device: Device = Device.cpu
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class DiagnoseJob:
    """Find the wiring that a drafter was trained with, and what an engine does instead."""

    name: str = "diagnose"
    steps: int = 4
    max_samples: int | None = None
    finalists: int = 8
    seed: int = 0
    axes: AxesConfig = field(default_factory=AxesConfig)
    trained_accuracy: float | None = None  # at step 0, as the training log has it
    device: Device = Device.cpu
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class BudgetConfig:
    """When a benchmark ends."""

    pairs: int = 8  # of passes, at each concurrency
    least: int = 3  # before precision may end it; without room for two servers, passes of each
    precision: float = 0.03  # half-width of the speedup's interval, relative
    minutes: float = 30.0
    restarts: int = 4  # starts of a server
    repeats: int = 3  # of pairs that were disturbed


@dataclass
class EngineBenchJob:
    """Measure the drafter behind an engine, beside the engine without it and the drafter alone."""

    name: str = "engine_bench"
    steps: int = 4  # of a chain or a tree: speculative-num-steps, num_speculative_tokens
    topk: int = 1  # speculative-eagle-topk
    draft_tokens: int | None = None  # speculative-num-draft-tokens of a tree, the root included
    prompts: str | None = None  # a local JSONL file, as data.capture.prompts; None: the data's own
    max_prompts: int = 16
    new_tokens: int | None = None  # of each answer; None: as many as the data's has
    ignore_eos: bool = True  # answers of exactly that length; false: they end where they end
    concurrency: list[int] = field(default_factory=lambda: [1])
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    control: bool = False  # a second baseline in the drafter's place: what two starts differ by
    advice: bool = True  # one start more, with one draft step, to tell drafting and verifying apart
    chain: bool = False  # beside a tree one start more, a chain of as many steps
    known_good: str | None = None  # a drafter's folder on the host: one start more, with it
    simulate: bool = False  # two starts more, SGLang told to accept no draft, and all of them
    start_s: float = 1800.0  # until a server must be ready
    first_s: float = 600.0  # until its first answer must be there
    request_s: float = 300.0  # until any other
    seed: int = 0  # of the bootstrap
    lease: bool = True  # have the GPU alone among jobs like it
    device: Device = (
        Device.auto
    )  # of the drafter alone; the engine takes the GPUs that jobs may see
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class EngineProbeJob:
    """Record which states an engine feeds to the drafter, and name them."""

    name: str = "engine_probe"
    steps: int = 4  # as in engine_bench, and so all others
    topk: int = 1
    draft_tokens: int | None = None
    prompts: str | None = None
    max_prompts: int = 4
    new_tokens: int | None = 32
    ignore_eos: bool = True
    start_s: float = 1800.0
    first_s: float = 600.0
    request_s: float = 300.0
    seed: int = 0
    lease: bool = True
    device: Device = Device.auto
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class ScriptJob:
    """Run a script of one's own; what it prints as `metric name=value` is measured."""

    name: str = "script"
    where: Where = Where.local
    path: str = MISSING
    files: list[str] = field(default_factory=list)  # local files to lie beside a local script
    args: list[str] = field(default_factory=list)
    metrics_file: str | None = None  # JSON that the script writes; None: metrics.json where it runs
    lease: bool = False  # for scripts that measure time: have the GPU alone among jobs like it
    device: Device = Device.auto
    threads: int = 2
    timeout_s: float | None = None


@dataclass
class Config:
    """One resolved hypothesis: what runs, what is logged and what is hashed."""

    claim: str | None = None
    predict: str | None = None
    strict: bool = False  # a refuted prediction is exit code 3
    detach: bool = False  # start the run and leave it to itself; `attach` or `collect` bring it in
    wiring: WiringConfig = field(default_factory=WiringConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: HostConfig = field(default_factory=HostConfig)
    job: Any = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    results: str = MISSING


JOB_SCHEMAS = {
    "drafter_test": DrafterTestJob,
    "capture_states": CaptureStatesJob,
    "inspect_data": InspectDataJob,
    "wiring_search": WiringSearchJob,
    "diagnose": DiagnoseJob,
    "engine_bench": EngineBenchJob,
    "engine_probe": EngineProbeJob,
    "script": ScriptJob,
}


def register() -> None:
    """Make the types, the resolvers and the launcher known to Hydra; called before composing."""
    if str(CLONE) not in sys.path:  # started elsewhere: Hydra looks for the launcher on this path
        sys.path.append(str(CLONE))
    OmegaConf.register_new_resolver("clone", lambda path: str(CLONE / path), replace=True)
    OmegaConf.register_new_resolver("python", lambda _="": sys.executable, replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, schema in JOB_SCHEMAS.items():
        store.store(group="job/schema", name=name, node=schema)
