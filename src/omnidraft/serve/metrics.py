"""/metrics: vLLM's names where it has one, ours elsewhere. Read from the counters when asked, so steps pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from omnidraft.serve.counters import Counters, Histogram
from omnidraft.serve.server import Server

_TARGET = ("model_name",)
_COUNTERS: dict[str, tuple[str, Callable[[Counters], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens.", lambda c: c.prompt_tokens),
    "vllm:generation_tokens": ("Tokens of answers.", lambda c: c.stats.tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in a KV cache.", lambda c: c.cached_tokens),
    "vllm:spec_decode_num_drafts": ("Steps that proposed something.", lambda c: c.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Proposed target tokens.", lambda c: c.proposed),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted target tokens.", lambda c: c.accepted),
    "omnidraft_steps": ("Passes of the target.", lambda c: c.stats.steps),
    "omnidraft_ngram_hits": ("Accepted n-grams.", lambda c: sum(dict(c.ngrams).values())),
    "omnidraft_draft_seconds": ("Seconds in the drafter's passes.", lambda c: c.stats.draft_seconds),
    "omnidraft_verify_seconds": ("Seconds in the target's passes.", lambda c: c.stats.verify_seconds),
}
_GAUGES: dict[str, tuple[str, Callable[[Counters], float | None]]] = {
    "omnidraft_acceptance_rate": (
        "Accepted of proposed, averaged over steps.",
        lambda c: c.stats.acceptance_rate,
    ),
    "omnidraft_tokens_per_step": ("Tokens a pass of the target.", lambda c: c.stats.tokens_per_step),
    "omnidraft_tokens_per_second": ("While decoding.", lambda c: c.tokens_per_second),
    "omnidraft_plain_tokens_per_second": (
        "Of plain decoding, by the steps that drafted nothing.",
        lambda c: c.plain_tokens_per_second,
    ),
    "omnidraft_speedup": ("Tokens a second against plain decoding, estimated.", lambda c: c.speedup),
    "omnidraft_draft_length": ("Draft tokens of the last step.", lambda c: c.draft_length),
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[Counters], Histogram]]] = {
    "vllm:time_to_first_token_seconds": ("From the request to its first token.", lambda c: c.first_token),
    "vllm:e2e_request_latency_seconds": ("From the request to its last token.", lambda c: c.whole),
}


class _Collector(Collector):
    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        yield GaugeMetricFamily("vllm:num_requests_running", "Answers under way.", server.worker.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Answers in the queue.", server.worker.waiting)
        counted = [(target.name, target.counters) for target in server.targets.loaded]
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_TARGET)
            for target, counters in counted:
                counter.add_metric([target], value(counters))
            yield counter
        for name, (text, measure) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_TARGET)
            for target, counters in counted:
                if (now := measure(counters)) is not None:
                    gauge.add_metric([target], now)
            yield gauge
        for name, (text, distribution) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=_TARGET)
            for target, counters in counted:
                histogram.add_metric([target], *_buckets(distribution(counters)))
            yield histogram
        yield from _by_reason(counted)
        yield from self._learning()

    def _learning(self) -> Iterator[Metric]:
        labels = ("model_name", "profile")
        updates = CounterMetricFamily("omnidraft_learning_updates", "Updates of the drafter.", labels=labels)
        reverted = CounterMetricFamily("omnidraft_learning_reverted", "Updates taken back.", labels=labels)
        before = GaugeMetricFamily(
            "omnidraft_held_out_agreement_before", "At the first look at held-out answers.", labels=labels
        )
        after = GaugeMetricFamily(
            "omnidraft_held_out_agreement_after", "At the latest look at held-out answers.", labels=labels
        )
        profiles = self._server.profiles
        for key, learner in profiles.learners.items():
            updates.add_metric(key, learner.account.updates)
            reverted.add_metric(key, learner.account.reverted)
            if curve := profiles.curves.get(key):
                before.add_metric(key, curve[0]["agreement"])
                after.add_metric(key, curve[-1]["agreement"])
        yield from (updates, reverted, before, after)


def _by_reason(counted: list[tuple[str, Counters]]) -> Iterator[Metric]:
    finished = CounterMetricFamily(
        "vllm:request_success", "Answers by how they ended.", labels=(*_TARGET, "finished_reason")
    )
    positions = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted target tokens by their place in the proposal.",
        labels=(*_TARGET, "position"),
    )
    for target, counters in counted:
        for reason, count in dict(counters.finished).items():
            finished.add_metric([target, reason], count)
        for position, count in enumerate(list(counters.accepted_at)):
            positions.add_metric([target, str(position)], count)
    yield finished
    yield positions


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    total, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.sum


def render(server: Server) -> tuple[bytes, str]:
    """The page, and its media type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(server))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
