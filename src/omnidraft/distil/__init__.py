"""A small drafter made from a larger one: some of its layers, a part of its vocabulary, trained on text."""
