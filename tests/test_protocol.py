"""The protocol of measurements, on a clock of its own: what is compared before it is timed, what is written down, how a run goes on."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from bench import protocol  # noqa: E402
from bench.protocol import Method, Sheet  # noqa: E402
from tests.clocks import Clock  # noqa: E402

X = torch.arange(6.0).view(2, 3) + 1


def refusing():
    return X.clone()


refusing.captured = False


def test_what_is_right_is_timed_interleaved_and_compared():
    clock = Clock({"coda": 2.0, "other": 3.0, "gemm": 1.6, "ours_gemm": 1.5})
    methods = {
        "coda": Method(X.clone, ours=True), "other": Method(lambda: X * 1.001), "gemm": Method(lambda: None, part=True),
        "ours_gemm": Method(lambda: None, part=True, says="half of it"),
    }  # fmt: skip
    found = protocol.measure(methods, lambda: (X,), clock)
    assert found["ok"] and found["ms"] == {"coda": 2.0, "other": 3.0, "gemm": 1.6, "ours_gemm": 1.5} and found["rounds"] == 3
    assert found["ratios"] == {"coda / products": 1.333, "other / products": 2.0, "other / coda": 1.5}
    assert clock.asked == [("times", [*methods])] * 2  # plain, then in graphs
    assert set(found["first_call_s"]) == set(found["peak_mib"]) == set(found["host_us"]) == set(methods)
    assert found["host_us"]["coda"] == 5.0 and found["says"] == {"ours_gemm": "half of it"} and 0 < found["distance"]["other"] < 2e-3
    assert not {"wrong", "raised", "without", "no_graph"} & set(found)


@pytest.mark.parametrize("wrong", [X * 1.1, X[:1], X.T, X * math.nan, (X, X), (None,), ()], ids=str)
def test_what_is_wrong_is_not_timed(wrong):
    clock = Clock({"coda": 1.0})
    found = protocol.measure({"coda": Method(X.clone, ours=True), "other": Method(lambda: wrong)}, lambda: (X,), clock)
    assert not found["ok"] and found["wrong"] == ["other"] and [*found["ms"]] == ["coda"] and clock.asked[0] == ("times", ["coda"])
    json.loads(json.dumps(found, allow_nan=False))


def test_what_raises_is_told_and_only_ours_must_not():
    def broken():
        raise RuntimeError("no kernel for this")

    found = protocol.measure({"coda": Method(X.clone, ours=True), "other": Method(broken)}, lambda: (X,), Clock({"coda": 1.0}))
    assert found["ok"] and found["raised"] == {"other": "RuntimeError: no kernel for this"} and [*found["ms"]] == ["coda"]
    found = protocol.measure({"coda": Method(broken, ours=True)}, lambda: (X,), Clock({}))
    assert not found["ok"] and found["ms"] == {}


def test_results_are_brought_into_order_and_may_leave_one_out():
    methods = {"coda": Method(lambda: (X.T, X), lambda out: (out[0].T, None), ours=True)}
    found = protocol.measure(methods, lambda: (X, X * 2), Clock({"coda": 1.0}))
    assert found["ok"] and found["without"] == {"coda": [1]}


def test_what_no_graph_can_hold_is_timed_plainly():
    clock = Clock({"coda": 1.0, "other": 2.0})
    found = protocol.measure({"coda": Method(X.clone, ours=True), "other": Method(refusing)}, lambda: (X,), clock)
    assert found["graph_ms"] == {"coda": 1.0} and found["no_graph"] == {"other": "RuntimeError: cannot be captured"}
    assert [*found["ms"]] == ["coda", "other"]
    assert "graph_ms" not in protocol.measure({"coda": Method(X.clone, ours=True)}, lambda: (X,), clock, graphs=False)


HEAD = {"device": "a card", "commit": "abc", "torch": "2", "date": "today", "command": "x"}


def test_a_sheet_is_gone_on_with(tmp_path, capsys):
    path = tmp_path / "folder" / "found.jsonl"
    sheet = Sheet(path, HEAD, ("work", "sizes"))
    sheet.add({"work": "a", "sizes": {"m": 1}, "ms": {}})
    sheet.add({"work": "b", "sizes": {"m": 1}, "left_out": "no time"})
    again = Sheet(path, {**HEAD, "date": "tomorrow", "command": "y"}, ("work", "sizes"))
    assert again.has(work="a", sizes={"m": 1}) and not again.has(work="a", sizes={"m": 2}) and not again.has(work="b", sizes={"m": 1})
    again.add({"work": "b", "sizes": {"m": 1}})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == HEAD and len(lines) == 4 and len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("change", [{"commit": "abd"}, {"device": "another"}, {"torch": "3"}])
def test_a_sheet_of_another_run_is_refused(tmp_path, change):
    path = tmp_path / "found.jsonl"
    Sheet(path, HEAD, ("work",)).add({"work": "a"})
    with pytest.raises(protocol.OtherRun, match=f"{[*change][0]} differ"):
        Sheet(path, {**HEAD, **change}, ("work",))


def test_the_head_says_where_and_by_what(monkeypatch, tmp_path):
    head = protocol.about([str(protocol.ROOT / "bench" / "x.py"), "--out", str(tmp_path / "file"), "3"], missing={"quack": "not installed"})
    assert head["command"] == "bench/x.py --out file 3" and head["missing"] and head["torch"] == torch.__version__
    assert {"device", "driver", "cuda", "python", "date", "commit"} <= set(head) and json.dumps(head)
    (tmp_path / "COMMIT").write_text("1234567\n")
    monkeypatch.setattr(protocol, "ROOT", tmp_path)
    assert protocol.commit() == "1234567"
    (tmp_path / "COMMIT").unlink()
    monkeypatch.setattr(protocol, "_output", lambda *command: "")
    assert protocol.commit() == "unknown"
