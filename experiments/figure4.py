"""Figure 4: acceptance while drafter and head learn."""

from omnidraft.experiments.curves import Curve
from omnidraft.experiments.learning import DIRECT, QUARTER, setting, with_head

HEADS = ("joint", "interleaved")


class Figure4(Curve):
    title = "Figure 4: acceptance while drafter and head learn"
    paper = "acceptance and speedup rise along the stream, for joint and interleaved training."
    differs = QUARTER

    def cells(self, scale):
        drafter, target = scale.same_vocabulary
        for head in HEADS:
            cell = setting(scale, scale.math, DIRECT, "direct", drafter=drafter, target=target)
            yield with_head(scale, cell, head) | dict(row=head, watch=1, test=0)
