"""What a run is refused for before anything is written or computed: options, files and target that do not fit."""

from __future__ import annotations

from dflash_fn import errors, prompts
from dflash_fn.config import parse_target
from dflash_fn.load import read_tokenizer
from dflash_fn.port import Port
from dflash_fn.sources import resolve
from dflash_fn.train import answers
from dflash_fn.train.options import CorpusOptions, DraftOptions, TextOptions, TrainOptions

__all__ = ["check_draft", "check_run"]


def check_run(options: TrainOptions, port: Port) -> None:
    """Look at all that a run will read, and at whether draft and target fit, before hours have gone by.

    Raises:
        InputError: files that are missing or hold no prompts; a draft that the target cannot have; a block longer than
            the context; conversations for a target without a chat template.
        DflashError: a target that cannot be found, or that nothing here runs.
    """
    _check_files(options)
    if options.target is None:
        source = resolve(options.source or "", role="target")
        spec = parse_target(source.config, name=source.name)
        depth, vocabulary, context = spec.num_layers, spec.vocab_size, spec.max_context
        if _talks(options.text) and not getattr(read_tokenizer(port, source), "chat_template", None):
            raise errors.InputError(
                f"text.kind: got {options.text.kind!r} with conversations, and the tokenizer of {source.name} has no "
                "chat template; use 'continue' with text files, or rows with a prompt"
            )
    else:
        depth, context = options.target.layers, options.target.max_context
        vocabulary = (options.corpus or CorpusOptions()).vocab_size
    check_draft(options.draft, depth, vocabulary)
    for name, size in (("draft", options.draft.block_size), ("eval", options.eval.block_size)):
        if size >= context:
            raise errors.InputError(f"{name}.block_size: got {size}, expected less than the context, {context}")


def check_draft(options: DraftOptions, depth: int, vocabulary: int) -> None:
    """Refuse a draft that a target of that many layers and ids cannot have.

    Raises:
        InputError: a tap, a layer to copy or a mask token that the target does not have.
    """
    copied = options.start_layers if options.start == "layers" else ()
    for name, layers in (("taps", options.taps), ("start_layers", copied)):
        beyond = [layer for layer in layers if not 0 <= layer < depth]
        if beyond:
            raise errors.InputError(f"draft.{name}: got layer {beyond[0]}; the target has 0 to {depth - 1}")
    if not 0 <= options.mask_token_id < vocabulary:
        raise errors.InputError(
            f"draft.mask_token_id: got {options.mask_token_id}, expected an id from 0 to {vocabulary - 1}"
        )


def _talks(options: TextOptions) -> bool:
    """Whether the text needs a chat template."""
    if options.kind != "given":
        return options.kind == "chat"
    return any("messages" in record for _, record in answers.read_given(options.files))


def _check_files(options: TrainOptions) -> None:
    for name in (*options.exclude, *options.eval.prompts):
        if not prompts.find(name).is_file():
            raise errors.InputError(
                f"{name}: no such file of prompts to keep out or to measure on; name others "
                "(exclude, eval.prompts; on the command line --exclude FILE)"
            )
        prompts.read(name)
    for name in options.text.files:
        if not prompts.find(name).is_file():
            raise errors.InputError(f"text.files: {name}: no such file")
    if options.text.kind == "given":
        answers.read_given(options.text.files)
