"""DFlash speculative decoding as pure functions over immutable decode states.

    pair = dflash_fn.load_zoo("tiny-code")
    state = dflash_fn.prefill(pair, "import random")
    state = dflash_fn.decode(state, pair, max_new_tokens=64)
    print(pair.tokenizer.decode(state.tokens[0]))

Reading order: `records` (the words), `opening`, `steps` and `judging` (the
algorithm), `loop` (the driver), `policies` (what is kept),
`port` (what a backend must do), `load` (where models come from).
"""

from dflash_fn.errors import DflashError
from dflash_fn.load import load_pair, load_zoo
from dflash_fn.loop import decode, rounds
from dflash_fn.opening import extend, prefill
from dflash_fn.policies import Policy, match
from dflash_fn.records import (
    Branches,
    ContextFeatures,
    DecodeState,
    Model,
    Pair,
    Proposal,
    StepInfo,
    StopReason,
    TokenLogprob,
    Verdict,
)
from dflash_fn.registry import get_port, port_names
from dflash_fn.sampling import Sampling
from dflash_fn.state_io import load_state, save_state
from dflash_fn.steps import propose, select, step, verify
from dflash_fn.stream import GenerationResponse, stream_generate

__version__ = "0.1.0"

__all__ = [
    "Branches",
    "ContextFeatures",
    "DecodeState",
    "DflashError",
    "GenerationResponse",
    "Model",
    "Pair",
    "Policy",
    "Proposal",
    "Sampling",
    "StepInfo",
    "StopReason",
    "TokenLogprob",
    "Verdict",
    "decode",
    "extend",
    "get_port",
    "load_pair",
    "load_state",
    "load_zoo",
    "match",
    "port_names",
    "prefill",
    "propose",
    "rounds",
    "save_state",
    "select",
    "step",
    "stream_generate",
    "verify",
]
