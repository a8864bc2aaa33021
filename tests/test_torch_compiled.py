"""The torch port on kernels compiled for the machine: the same contract, and more of it."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors
from dflash_fn.cli.commands import app
from dflash_fn.port import Port
from tests.helpers import proposers
from tests.helpers.runs import Run, decode_plainly, differing, fetch, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

torch = pytest.importorskip("torch")
native = pytest.importorskip("dflash_fn_torch.native", exc_type=ImportError)
panels = pytest.importorskip("dflash_fn_torch.panels", exc_type=ImportError)
ports = pytest.importorskip("dflash_fn_torch.port", exc_type=ImportError)

EVEN = TargetDesign(inner=64, hidden=64, head_dim=16)
DESIGNS: dict[str, TargetDesign | DraftDesign] = {
    "draft": DraftDesign(target=EVEN, block_size=4),
    "odd": TargetDesign(inner=33, hidden=20, head_dim=12, heads=3, kv_heads=1, vocab=37),
    "qwen3": replace(EVEN, family="qwen3", seed=20),
    "window": replace(EVEN, family="qwen3", seed=20, window=5),
    "sliding-draft": DraftDesign(target=EVEN, block_size=4, window=3, causal=True),
    "bias": replace(EVEN, bias=True),
    "hybrid": replace(EVEN, family="qwen3_5", layers=3),
}
PROMPT = np.random.default_rng(0).integers(0, 37, 9).tolist()


@pytest.fixture(scope="module")
def port() -> Port:
    return ports.TorchPort().compiling()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("compiled"))


def plain(pair: dflash_fn.Pair, prompt: list[int], width: int, count: int) -> Run:
    return decode_plainly(dflash_fn.prefill(pair, prompt, width=width), pair, count)


def check(pair: dflash_fn.Pair, prompt: list[int], width: int, count: int) -> None:
    expected = plain(pair, prompt, width, count)
    proposer = proposers.corrupted([[*prompt, *expected.emitted[0]]], seed=5, rate=0.15)
    state = dflash_fn.prefill(pair, prompt, width=width)
    found = run(state, pair, max_new_tokens=count, block_size=width, proposer=proposer)
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("width", [2, 3, 5, 8, 13, 32])
def test_bits_hold_for_every_kind_of_target(port: Port, checkpoints: Checkpoints, name: str, width: int) -> None:
    check(checkpoints.pair(port, DESIGNS[name]), PROMPT, width, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("border", [256, 512])
def test_bits_hold_across_key_counts(port: Port, checkpoints: Checkpoints, border: int, dtype: str) -> None:
    prompt = np.random.default_rng(border).integers(0, 48, border - 14).tolist()
    check(checkpoints.pair(port, DESIGNS["draft"], dtype), prompt, 8, 26)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["draft", "qwen3", "window"])
def test_bits_are_the_same_at_every_width(port: Port, checkpoints: Checkpoints, name: str, dtype: str) -> None:
    pair = checkpoints.pair(port, DESIGNS[name], dtype)
    expected = plain(pair, PROMPT, 1, 12)
    as_wide_as_the_state = replace(pair, target=replace(pair.target, narrows=False))
    for width in (2, 7, 8, 16):
        found = plain(as_wide_as_the_state, PROMPT, width, 12)
        assert found.infos[-1].logits.shape[1] == width
        assert differing(found.logits[0], expected.logits[0]) == []


@pytest.mark.parametrize("name", DESIGNS)
def test_a_verification_is_as_wide_as_its_block_where_that_makes_no_difference(
    port: Port, checkpoints: Checkpoints, name: str
) -> None:
    pair = checkpoints.pair(port, DESIGNS[name])
    proposer = proposers.at_random(3)
    for size in (1, 3, 8):
        found = run(
            dflash_fn.prefill(pair, PROMPT, width=8), pair, max_new_tokens=12, block_size=size, proposer=proposer
        )
        assert found.infos[-1].logits.shape[1] == (8 if name in ("bias", "hybrid") else size)
        assert differing(found.logits[0], plain(pair, PROMPT, 8, 12).logits[0]) == []


@pytest.fixture(params=["-march=znver2", "-march=haswell", "-march=x86-64"])
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels for another processor, which this one can run."""
    flags = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not flags.is_file() or not {"avx2", "fma"} < set(flags.read_text().split()):
        pytest.skip("needs an x86-64 with AVX2")
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_tuning", lambda: request.param)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


# gcc fuses products and sums by the processor it tunes for, and for Zen not in every copy of a loop.
@pytest.mark.usefixtures("tuned")
def test_bits_hold_for_other_processors(checkpoints: Checkpoints) -> None:
    for name, width in (("qwen3", 8), ("window", 3), ("odd", 13)):
        design = DESIGNS[name]
        assert isinstance(design, TargetDesign)
        check(dflash_fn.load_pair(checkpoints.folder(design), compile=True), PROMPT, width, 16)


def test_rows_have_the_bits_of_their_single_row_runs(port: Port, checkpoints: Checkpoints) -> None:
    pair, prompts = checkpoints.pair(port, DESIGNS["window"]), [[5, 9, 2], [7, 4, 11, 3, 30, 8, 1]]
    together = run(dflash_fn.prefill(pair, prompts, width=4), pair, max_new_tokens=8)
    for row, ids in enumerate(prompts):
        alone = run(dflash_fn.prefill(pair, ids, width=4), pair, max_new_tokens=8)
        assert differing(together.logits[row], alone.logits[0]) == []


@pytest.mark.parametrize("name", DESIGNS)
def test_logits_are_those_of_the_port_as_it_is_but_for_rounding(
    port: Port, checkpoints: Checkpoints, name: str
) -> None:
    prompt = np.random.default_rng(1).integers(0, 37, 300).tolist()
    pair = checkpoints.pair(port, DESIGNS[name])
    design = DESIGNS[name]
    target = checkpoints.folder(design.target if isinstance(design, DraftDesign) else design)
    as_it_is = dflash_fn.load_pair(target)
    ours, theirs = (plain(each, prompt, 4, 1).logits[0] for each in (without_draft(pair), as_it_is))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "window", "bias", "hybrid"])
def test_taps_are_those_of_the_port_as_it_is_but_for_rounding(port: Port, checkpoints: Checkpoints, name: str) -> None:
    folder = checkpoints.folder(DESIGNS[name])
    ours, theirs = (dflash_fn.load_pair(folder, compile=own) for own in (True, False))
    layers = ours.target.spec.num_layers
    taps = (layers - 1, *range(layers - 1))
    found = []
    for pair in (ours, theirs):
        cache = pair.port.new_cache(pair.target, 64)
        rows = pair.port.join_rows((cache, pair.port.new_cache(pair.target, 64)))
        tokens = pair.port.asarray(np.random.default_rng(2).integers(0, 37, (2, 7)), "cpu")
        options: dict[str, Any] = {"taps": taps, "head": True, "exact_rows": False}
        found.append(pair.port.to_numpy(pair.port.target_pass(pair.target, rows, tokens, **options).features))
    assert found[0].shape == (2, 7, layers * ours.target.spec.hidden_size)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (37, 20), (1, 3), (130, 576)])
def test_a_product_treats_any_number_of_tokens_alike(outputs: int, inputs: int, dtype: Any) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    x = torch.randn(19, inputs, generator=random).to(dtype)
    packed = panels.in_panels(weight)
    whole = panels.panel_product(x, packed)
    expected = (x.double() @ weight.double().t()).to(dtype)
    assert torch.allclose(whole, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)
    for count in range(1, 20):
        first = 19 - count
        assert np.array_equal(
            fetch(dflash_fn.get_port("torch"), panels.panel_product(x[first:], packed)),
            fetch(dflash_fn.get_port("torch"), whole[first:]),
        )


def test_a_norm_before_a_product_is_one_for_every_token_alike() -> None:
    random = torch.Generator().manual_seed(0)
    x, norm, weight = (torch.randn(*shape, generator=random) for shape in ((9, 48), (48,), (37, 48)))
    packed = panels.in_panels(weight)
    made = panels.panel_product(x, packed, norm, 1e-6)
    scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    np.testing.assert_allclose(made, scaled @ weight.double().t(), rtol=1e-4, atol=1e-4)
    for token in range(9):
        assert torch.equal(panels.panel_product(x[token : token + 1], packed, norm, 1e-6)[0], made[token])


def test_load_pair_compiles_on_request(checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder(DESIGNS["qwen3"])
    pair = dflash_fn.load_pair(folder, compile=True)
    assert pair.target.weights.layers[0].fused is not None
    assert isinstance(pair.target.weights.head, panels.Panels)
    assert dflash_fn.load_pair(folder).target.weights.layers[0].fused is None


def test_the_command_line_compiles_on_request() -> None:
    flags = ["generate", "def f(x):", "--max-new-tokens", "12", "--check", "--json", "--compile"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["check"]["logits_identical"] is True


def test_a_second_start_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.library.__wrapped__().dflash_panel() == native.library().dflash_panel()


def test_no_compiler_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(
        errors.BackendMissing, match=r"found no no-such-compiler; install one .*, name one in CXX, or do"
    ):
        native.library.__wrapped__()


def test_a_compiler_that_fails_is_an_error_with_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(errors.BackendMissing, match=r"broken .*kernels\.cpp.* failed(?s:.*)no such instruction"):
        native.library.__wrapped__()
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_compiler_that_writes_nothing_is_told_as_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path))
    with pytest.raises(errors.BackendMissing, match=r"wrote no library; name a C\+\+ compiler with OpenMP in CXX"):
        native.library.__wrapped__()


def test_a_damaged_library_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path))
    place = tmp_path / "kernels" / f"{native._digest(native.compiler())}.so"
    place.parent.mkdir()
    place.write_text("junk", encoding="utf-8")
    assert native.library.__wrapped__().dflash_panel() == native.library().dflash_panel()
    assert place.stat().st_size > 1000


def test_a_cache_folder_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(errors.CacheFolderError, match="compiled kernels cannot be written"):
        native.library.__wrapped__()


def test_only_a_cpu_is_compiled_for() -> None:
    with pytest.raises(errors.InputError, match="compile: got device cuda:0; port torch compiles for cpu alone"):
        ports._check_compiled(torch.float32, "cuda:0")


def test_a_port_without_kernels_is_refused(checkpoints: Checkpoints) -> None:
    class Bare:
        name = "bare"

        def load_target(self) -> None: ...

    with pytest.raises(errors.InputError, match="compile: port bare has no kernels to compile; leave compile out"):
        dflash_fn.load_pair(checkpoints.folder(EVEN), port=Bare(), compile=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("units", "notes"), [(True, 0), (False, 1)])
def test_a_cpu_without_bfloat16_units_is_told_of(monkeypatch: pytest.MonkeyPatch, units: bool, notes: int) -> None:
    monkeypatch.setattr(ports, "has_bfloat16_units", lambda: units)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = ports.TorchPort().info().notes
    assert len(found) == notes
    assert all(note.startswith("this CPU has no bfloat16 units") for note in found)
