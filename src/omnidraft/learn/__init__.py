"""Learning while it works: the drafter is trained on what verification already knows (docs/learning.md)."""
