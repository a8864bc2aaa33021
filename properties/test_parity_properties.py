"""Random small models against transformers: P11."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_fn import load_pair
from dflash_fn.tolerances import UNIT, bound
from tests.helpers.parity_models import (
    CONFIGS,
    LINEAR,
    LLAMA3,
    YARN,
    distance,
    in_dtype,
    random_model,
    said_by_port,
    said_by_transformers,
)

ROPES = [None, LINEAR, LLAMA3, YARN]
OPTIONS = {
    "num_hidden_layers": st.integers(1, 4),
    "intermediate_size": st.sampled_from([8, 24, 64]),
    "head_dim": st.sampled_from([4, 8, 12, 16]),
    "vocab_size": st.integers(8, 70),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "rope_parameters": st.sampled_from(ROPES),
}
OWN_OPTIONS = {
    "llama": {"mlp_bias": st.booleans()},
    "qwen3": {
        "use_sliding_window": st.booleans(),
        "sliding_window": st.integers(1, 9),
        "max_window_layers": st.just(1),
    },
}


@st.composite
def configs(draw):
    """A config of transformers: any mix of what the decoder runs, with products about as large as their input.

    The hidden size is 16 or more: a state of few numbers may come near zero, and a norm then magnifies its error.
    """
    family = draw(st.sampled_from(sorted(CONFIGS)))
    kv_heads, group = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    heads = kv_heads * group
    least = -(-16 // heads)
    hidden = heads * draw(st.integers(least, least + 8))
    options = draw(st.fixed_dictionaries({**OPTIONS, **OWN_OPTIONS[family]}))
    return CONFIGS[family](
        **options,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        initializer_range=hidden**-0.5,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@given(configs(), st.sampled_from(sorted(UNIT)), st.integers(0, 2**32 - 1), st.lists(st.integers(1, 12), min_size=1))
def test_p11_logits_and_hidden_states_are_those_of_transformers(config, dtype, seed, chunks):
    """P11: in any dtype, and read in any chunks, a target says what transformers' model says, but for rounding."""
    model = in_dtype(random_model(config, seed), dtype)
    pair = load_pair(model)
    ids = [(seed + 7 * index) % config.vocab_size for index in range(sum(chunks))]
    ours, theirs = said_by_port(pair, ids, chunks), said_by_transformers(model, ids)
    spec = pair.target.spec
    assert distance(ours.logits, theirs.logits) <= bound(dtype, "logits", spec)
    for layer, (mine, other) in enumerate(zip(ours.hidden, theirs.hidden, strict=True), start=1):
        assert distance(mine, other) <= bound(dtype, "hidden", spec, layers=layer)
