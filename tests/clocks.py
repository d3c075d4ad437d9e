"""Clocks that stand in for a GPU's in tests of what is measured (`bench.protocol.Gpu`)."""

from __future__ import annotations


class Clock:
    """Milliseconds by the name of a call; what was asked is in `asked`."""

    def __init__(self, ms):
        self.ms, self.asked = ms, []

    def wait(self):
        pass

    def times(self, calls):
        self.asked.append(("times", [*calls]))
        return {name: [self.ms[name] * x for x in (1.0, 0.9, 1.1)] for name in calls}

    def graph(self, call):
        if not getattr(call, "captured", True):
            raise RuntimeError("cannot be captured")
        return call

    def host(self, call):
        return 5.04

    def peak(self, call):
        return 7


class AnyClock(Clock):
    """Everything takes a millisecond."""

    def times(self, calls):
        self.asked.append(("times", [*calls]))
        return dict.fromkeys(calls, [1.0, 1.0])
