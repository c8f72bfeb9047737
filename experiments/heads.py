"""The acceptance head across vocabularies, which the paper names as future work, against every fixed length."""

from dataclasses import replace

from omnidraft.experiments import adaptive

LENGTHS = (2, 4, 6, 8)


class Heads(adaptive.Adaptive):
    title = "Adaptive drafting across vocabularies"
    method = "text"
    loss = "pushforward"
    told = dict.fromkeys(("SpD", "adapt only", "distill only", "joint", "interleaved"), ())

    def pair(self, scale):
        return scale.drafter, scale.targets[0]

    def weights(self, scale):
        return scale.lora

    def cells(self, scale):
        for cell in super().cells(replace(scale, tasks=(scale.math, scale.code))):
            if "head" in cell:
                yield cell
            else:
                for k in LENGTHS:  # the best of them is known in hindsight only
                    yield cell | dict(k=k)
