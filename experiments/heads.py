"""The acceptance head across vocabularies, which the paper names as future work."""

from omnidraft.experiments import adaptive


class Heads(adaptive.Adaptive):
    title = "Adaptive drafting across vocabularies"
    method = "text"
    loss = "pushforward"
    told = dict.fromkeys(("SpD", "adapt only", "distill only", "joint", "interleaved"), ())

    def pair(self, scale):
        return scale.drafter, scale.targets[0]

    def weights(self, scale):
        return scale.lora
