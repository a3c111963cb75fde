"""Errors in the examples that others take as a starting point."""

from __future__ import annotations

from planted.error import Error, tests

_LABORATORY = "examples/laboratory/"
_LANGUAGE = "tests/mp/test_language_example.py -k "

ERRORS = [
    Error(
        "the language model is evaluated without the outer parameters",
        "stale copy",
        "examples/language.py",
        "self.optimizer.outer_parameters() if self.has_outer else nullcontext()",
        "nullcontext()",
        (_LANGUAGE + "evaluated",),
    ),
    Error(
        "the language model is evaluated on one worker's parameters",
        "stale copy",
        "examples/language.py",
        "return hvd.average_parameters(self.model)",
        "return {name: value.clone() for name, value in self.model.state_dict().items()}",
        (_LANGUAGE + "evaluated",),
    ),
    Error(
        "workers train the language model on the same sequences",
        "swapped rank",
        _LABORATORY + "text.py",
        "share(self._batch, rank, size)",
        "share(self._batch, 0, size)",
        (_LANGUAGE + "divide",),
    ),
    Error(
        "held-out text is trained on",
        "wrong bucket",
        _LABORATORY + "text.py",
        "train, held_out = parts[False], parts[True]",
        "train, held_out = parts[False] | parts[True], parts[True]",
        (_LANGUAGE + "held_out",),
    ),
    Error(
        "a byte of the text is to predict itself",
        "off by one",
        "examples/language.py",
        "loss = loss_of(logits, rows[:, 1:])",
        "loss = loss_of(logits, rows[:, :-1])",
        (_LANGUAGE + "next_byte",),
    ),
    Error(
        "Muon and AdamW keep their states from checkpoints",
        "dropped state in a checkpoint",
        _LABORATORY + "gpt.py",
        "            part.state = self.state\n",
        "",
        (_LANGUAGE + "muon",),
    ),
    Error(
        "the rate of the language model falls by the tokens of one rank",
        "wrong weight",
        "examples/language.py",
        "rate(self.args.lr, number, self.steps)",
        "rate(self.args.lr, number, self.steps * hvd.size())",
        (_LANGUAGE + "divide",),
    ),
    Error(
        "the loss is lost when ranks change at the end of an epoch",
        "forgotten rollback",
        "examples/elastic.py",
        "loss {state.loss:.4f} on",
        "loss {loss.item():.4f} on",
        (tests("examples", "last_batch"),),
    ),
]
