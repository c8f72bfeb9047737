"""Table 8: step times and vocabularies."""

from omnidraft.curve import measure
from omnidraft.experiments import markdown
from omnidraft.experiments.experiment import Experiment

SIZES = (1, 2, 3, 4, 5, 6, 8, 9)  # tokens of a pass
REPEAT = 9
PAPER = (
    "Llama-68M 2.03 ms, vocabulary 32,000; Qwen2-7B 26.67 ms, 152,064, shared 22,275; Llama3-8B 28.46 ms, 128,256, "
    "shared 22,416; Vicuna-7B 26.83 ms, 32,000, all shared."
)


class Table8(Experiment):
    title = "Table 8: step times and vocabularies"
    paper = PAPER
    apart = ("shared_with",)
    differs = (
        "a CPU, and models a tenth as large: a draft token costs more of a pass than on the paper's GPU (7 "
        "%)."
    )

    def cells(self, scale):
        drafters = (scale.drafter, scale.larger_drafter, scale.same_vocabulary[0])
        targets = (*scale.targets, *scale.scaling, scale.same_vocabulary[1])
        for drafts, models in ((True, drafters), (False, targets)):
            for model in dict.fromkeys(models):
                yield dict(model=model, drafts=drafts, shared_with=scale.drafter, repeat=REPEAT)

    def run(self, lab, cell):
        vocab, drafter = lab.vocab(cell["model"]), lab.vocab(cell["shared_with"])
        times = measure(lab.model(cell["model"], drafts=cell["drafts"]), SIZES, repeat=cell["repeat"])
        pieces = {piece for piece in drafter.pieces if piece}
        shared = sum(bool(piece) and piece in pieces for piece in vocab.pieces[: vocab.size])
        return dict(passes=times, width=vocab.width, tokens=vocab.size, shared=shared)

    def seconds(self, cell, times):
        return (REPEAT + 2) * len(SIZES) * times.target / 1000

    def report(self, results):
        rows = [
            (
                model, "drafter" if drafts else "target", *(f"{found['passes'][str(size)]:.0f}" for size in SIZES),
                f"{found['width']:,}", f"{found['shared']:,}",
            )
            for (model, drafts), (found, *_) in results.groups("model", "drafts")
        ]  # fmt: skip
        head = ("model", "as", *(f"{size}" for size in SIZES), "width", "tokens shared with the drafter")
        return (
            f"{markdown.table(head, rows)}\n\nMilliseconds of a pass over 1 to {SIZES[-1]} tokens behind 64, medians "
            f"of {REPEAT} in turn. Tokens are shared if they stand for the same bytes."
        )
