"""The command `codac`, run as a process as a user runs it: what it prints, its exit status, what it leaves on disk, how long it takes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coda_lang import cli, driver
from coda_lang.diagnostics.model import CodaError

ROOT = Path(__file__).resolve().parent.parent
SWIGLU = ROOT / "specs" / "swiglu.coda"
BAD = "program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])\ny = silu(x @ ww)\n"


def codac(*args: object, cwd: Path | None = None, stdin: str | bytes | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [sys.executable, "-m", "coda_lang", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | env,
        input=data if data is not None else b"",
        capture_output=True,
        timeout=120,
    )
    result = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    return result


# --- what works --------------------------------------------------------------------------------------------------------


def test_emits_a_module_that_compiles_as_python(tmp_path: Path) -> None:
    out = tmp_path / "kernel.py"
    done = codac(SWIGLU, "-o", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = out.read_text(encoding="utf-8")
    compile(text, str(out), "exec")
    assert "# src: " in text and "swiglu.coda:" in text
    assert [p.name for p in tmp_path.iterdir()] == ["kernel.py"], "a temporary file was left"


def test_options_may_come_first(tmp_path: Path) -> None:
    assert codac("emit", "-o", tmp_path / "a.py", SWIGLU).returncode == 0
    assert codac("-o", tmp_path / "b.py", SWIGLU).returncode == 0
    assert (tmp_path / "a.py").read_text() == (tmp_path / "b.py").read_text()


def test_prints_the_module_and_reads_standard_input() -> None:
    done = codac("-", "-o", "-", stdin=SWIGLU.read_text())
    assert done.returncode == 0
    assert "def swiglu" in done.stdout


@pytest.mark.slow
def test_emitting_twice_gives_the_same_text(tmp_path: Path) -> None:
    """Across processes, whose hash seeds differ."""
    texts = {codac(SWIGLU, "-o", "-", PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
    assert len(texts) == 1 and texts != {""}


@pytest.mark.slow
def test_line_ends_and_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    text = SWIGLU.read_text()
    plain = tmp_path / "a.coda"
    plain.write_bytes(text.encode())
    expected = codac("a.coda", "-o", "-", cwd=tmp_path).stdout
    for data in (b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode(), text.replace("\n", "\r").encode()):
        plain.write_bytes(data)
        assert codac("a.coda", "-o", "-", cwd=tmp_path).stdout == expected != ""


def test_check_says_what_the_programs_become() -> None:
    done = codac("check", SWIGLU)
    assert done.returncode == 0 and done.stdout.startswith("swiglu") and done.stderr == ""
    found = json.loads(codac("check", "--json", SWIGLU).stdout)
    assert found["diagnostics"] == [] and [p["name"] for p in found["programs"]] == ["swiglu"]


def test_a_warning_leaves_the_answer_and_the_exit_status_as_they_are(tmp_path: Path) -> None:
    source = "type T = bf16 | f16\nprogram p(x: T[m, d], w: T[n, d], bias: T[n]) -> (y: T[m, n])\ny = x @ w\n"
    done = codac("check", "-", stdin=source)
    assert done.returncode == 0 and done.stdout == "p_bf16: 1 kernel\np_f16: 1 kernel\n"
    assert done.stderr.startswith("warning[C0215]: the input `bias` is never read\n --> <stdin>:2:35\n")
    assert done.stderr.count("warning[") == 1
    found = codac("check", "--json", "-", stdin=source)
    [d] = json.loads(found.stdout)["diagnostics"]
    assert found.returncode == 0 and found.stderr == "" and (d["code"], d["severity"], d["span"]["line"]) == ("C0215", "warning", 2)
    planned = codac("plan", "-", stdin=source)
    assert planned.returncode == 0 and "p_bf16" in planned.stdout and planned.stderr == done.stderr


def test_param_and_type(tmp_path: Path) -> None:
    source = "type T = bf16 | f16\nparam eps = 0.125\nprogram p(x: T[m, d], w: T[n, d]) -> (y: T[m, n])\ny = x @ w + eps\n"
    both = codac("-", "-o", "-", stdin=source).stdout
    one = codac("-", "-o", "-", "--type", "T=f16", "--param", "eps=0.25", stdin=source).stdout
    assert "p_bf16" in both and "p_f16" in both and "+ 0.125 " in both
    assert "p_bf16" not in one and "+ 0.25 " in one and "0.125" not in one


@pytest.mark.slow
def test_unknown_param_and_type_are_refused() -> None:
    for option in ("--param=epss=1e-6", "--type=T=f16", "--extent=lan=2"):
        done = codac("check", option, SWIGLU)
        assert done.returncode == 1 and "error[C0" in done.stderr, done.stderr


@pytest.mark.slow
def test_comparing_with_float64() -> None:
    pytest.importorskip("torch")
    done = codac("test", SWIGLU, "--shape", "m=3,d=8,f=5")
    assert done.returncode == 0 and "all outputs agree" in done.stdout and "m=3" in done.stdout
    for shape in ("q=3", "nonsense"):
        assert codac("test", SWIGLU, "--shape", shape).returncode == 2


# --- what is wrong with a source ------------------------------------------------------------------------------------------


def test_errors_have_place_code_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "bad.coda").write_text(BAD)
    for args in (("check", "bad.coda"), ("bad.coda", "-o", "kernel.py")):
        done = codac(*args, cwd=tmp_path)
        assert done.returncode == 1 and done.stdout == ""
        assert "bad.coda:2:14" in done.stderr and "did you mean `w`" in done.stderr and "codac explain C0" in done.stderr
    assert not (tmp_path / "kernel.py").exists()


def test_a_refused_source_leaves_the_old_output_alone(tmp_path: Path) -> None:
    out = tmp_path / "kernel.py"
    out.write_text("old")
    assert codac("-", "-o", out, stdin=BAD).returncode == 1
    assert out.read_text() == "old"


def test_json_errors(tmp_path: Path) -> None:
    done = codac("check", "--json", "-", stdin=BAD)
    assert done.returncode == 1 and done.stderr == ""
    (d,) = json.loads(done.stdout)["diagnostics"]
    assert d["code"].startswith("C02") and d["span"]["line"] == 2 and d["help"]
    missing = codac("check", "--json", "no.coda", cwd=tmp_path)
    assert missing.returncode == 2 and json.loads(missing.stdout)["diagnostics"][0]["code"] == "C0801"


def test_colour_only_on_a_terminal() -> None:
    import pty

    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [sys.executable, "-m", "coda_lang", "check", "no.coda"]
    subprocess.run(command, env=env, stderr=follower, stdin=subprocess.DEVNULL, timeout=60)
    assert b"\x1b[" in os.read(leader, 65536)
    subprocess.run(command, env=env | {"NO_COLOR": "1"}, stderr=follower, stdin=subprocess.DEVNULL, timeout=60)
    assert b"\x1b[" not in os.read(leader, 65536)
    os.close(leader)
    os.close(follower)
    piped = subprocess.run(command, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert piped.stderr and b"\x1b[" not in piped.stderr


def test_a_terminal_that_knows_no_unicode_still_gets_the_message() -> None:
    source = "program p(x: bf16[m]) -> (y: bf16[m])\ny = x × x\n"
    done = codac("check", "-", stdin=source, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 1 and "C01" in done.stderr


# --- hostile sources ---------------------------------------------------------------------------------------------------------

HOSTILE = {
    "empty": b"",
    "blank": b" \n\t\n\n",
    "comments only": b"# nothing\n",
    "junk": bytes(range(1, 128)) * 4,
    "binary": bytes(range(256)) * 16,
    "not utf-8": b"program p(x: bf16[m]) -> (y: bf16[m])\ny = \xff\xfe\n",
    "a megabyte on one line": b"y = " + b"x + " * 262144 + b"x\n",
    "a megabyte of lines": b"a = b\n" * 180000,
    "nested 10000 deep": b"program p(x: f32[m]) -> (y: f32[m])\ny = " + b"(" * 10000 + b"x" + b")" * 10000 + b"\n",
    "negated 10000 times": b"program p(x: f32[m]) -> (y: f32[m])\ny = " + b"-" * 10000 + b"x\n",
    "called 10000 deep": b"program p(x: f32[m]) -> (y: f32[m])\ny = " + b"exp(" * 10000 + b"x" + b")" * 10000 + b"\n",
    "a sum of 10000": b"program p(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m, n])\ny = x @ w" + b" + 1.0" * 10000 + b"\n",
    "indented by 10000": b"program p(x: f32[m]) -> (y: f32[m])\n" + b" " * 10000 + b"y = x\n",
    "too large": b"#" * (driver.MAX_BYTES + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_get_an_answer(name: str) -> None:
    """A diagnostic, within seconds; never a traceback, a crash or a bug report."""
    start = time.monotonic()
    done = codac("check", "-", stdin=HOSTILE[name])
    assert done.returncode in (0, 1, 2), done.stderr[-2000:]
    assert (done.returncode == 0) == (not done.stderr)
    assert len(done.stderr) < 100_000
    assert time.monotonic() - start < 20


# --- files and the command line ----------------------------------------------------------------------------------------------


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    done = codac("check", ROOT / "specs" / "swigul.coda")
    assert done.returncode == 2 and "C0801" in done.stderr and "specs/swiglu.coda?" in done.stderr
    assert "no .coda files" in codac("check", "x.coda", cwd=tmp_path).stderr


def test_unreadable_sources(tmp_path: Path) -> None:
    (tmp_path / "bin.coda").write_bytes(b"\0\1\2")
    for args in ((tmp_path,), (tmp_path / "bin.coda",), (tmp_path / "no" / "x.coda",), ("",)):
        done = codac("check", *args)
        assert done.returncode == 2 and "error[C0801]" in done.stderr, done.stderr
    with pytest.raises(CodaError, match="C0801"):
        driver.read_file("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path: Path) -> None:
    source = tmp_path / "a.coda"
    source.write_text(SWIGLU.read_text())
    source.chmod(0)
    assert "C0801" in codac("check", source).stderr
    tmp_path.chmod(0o500)
    assert "C0802" in codac(SWIGLU, "-o", tmp_path / "k.py").stderr
    tmp_path.chmod(0o700)


@pytest.mark.slow
def test_unwritable_outputs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "no" / "k.py", tmp_path / "file" / "k.py"):
        done = codac(SWIGLU, "-o", target)
        assert done.returncode == 2 and "error[C0802]" in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_output_never_overwrites_the_source(tmp_path: Path) -> None:
    source = tmp_path / "a.coda"
    source.write_text(SWIGLU.read_text())
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link", tmp_path / "." / "a.coda"):
        assert codac(source, "-o", target).returncode == 2
    assert source.read_text() == SWIGLU.read_text()


@pytest.mark.parametrize("name", ['q"""x', "back\\N{x}", "new\nline", os.fsdecode(b"\xff"), "ünï", "tab\t", "# no", "$(x) y"])
@pytest.mark.slow
def test_odd_file_names(tmp_path: Path, name: str) -> None:
    source = tmp_path / f"{name}.coda"
    source.write_text(SWIGLU.read_text())
    done = codac(source, "-o", tmp_path / "kernel.py")
    assert done.returncode == 0, done.stderr
    compile((tmp_path / "kernel.py").read_text(encoding="utf-8"), "kernel.py", "exec")
    source.write_text(BAD)
    assert codac("check", source).returncode == 1


def test_writing_is_atomic_and_keeps_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    link.symlink_to(real)
    driver.write(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CodaError, match="No space left"):
        driver.write(real, "newer")
    assert real.read_text() == "new" and sorted(p.name for p in tmp_path.iterdir()) == ["link.py", "real.py"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_usage_errors() -> None:
    wrong = (["chekc"], [SWIGLU], ["check"], ["--nonsense"], ["check", "--param", "eps", SWIGLU], ["check", "--param", "eps=x", SWIGLU])
    for args in wrong:
        done = codac(*args)
        assert done.returncode == 2 and done.stderr, args
    assert "did you mean `check`?" in codac("chekc").stderr
    from coda_lang.backend_cute import schedules

    done = codac("build", SWIGLU, "--parts", schedules.MOST + 1, "-o", "built")
    assert done.returncode == 2 and f"not in the range 1<=x<={schedules.MOST}" in done.stderr
    assert "given twice" in codac("check", "--param=a=1", "--param=a=2", SWIGLU).stderr


def test_help_and_version() -> None:
    assert "codac FILE -o kernel.py" in codac("--help").stdout
    assert codac().stdout.startswith("Usage") or codac().stderr.startswith("Usage")
    assert codac("--version").stdout.startswith("codac 0.")
    for command in cli.cli.commands:
        assert codac(command, "--help").returncode == 0


def test_every_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from coda_lang.diagnostics.catalog import CATALOG

    for code in CATALOG:
        assert cli.main(["explain", code]) == 0
        assert capsys.readouterr().out.startswith(f"{code}: ")


def test_ops_and_explain() -> None:
    listed = codac("ops").stdout
    assert "silu(x)" in listed and "rmsnorm[d](x, g, eps)" in listed
    assert "derivative" in codac("ops", "silu").stdout
    assert "def rmsnorm" in codac("ops", "rmsnorm").stdout
    wrong = codac("ops", "sillu")
    assert wrong.returncode == 2 and "did you mean `silu`?" in wrong.stderr
    assert codac("explain", "C0401").stdout.startswith("C0401")
    assert codac("explain", "C9999").returncode == 2


def test_every_operator_has_a_page() -> None:
    from coda_lang import listing

    for name in listing.names():
        assert listing.page(name), name
    assert listing.page("no such thing") is None


# --- the world around ----------------------------------------------------------------------------------------------------------


def test_broken_pipe_is_silent() -> None:
    command = f"{sys.executable} -m coda_lang ops | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.count("\n") == 1 and done.returncode in (0, cli.PIPE)


@pytest.mark.parametrize("target, status, said", [("&-", 0, ""), ("/dev/full", 2, "error[C0802]")])
def test_standard_output_that_takes_nothing(target: str, status: int, said: str) -> None:
    command = f"{sys.executable} -m coda_lang ops >{target}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and "Traceback" not in done.stderr and said in done.stderr


def test_interrupt() -> None:
    """Ctrl-C while it waits for standard input."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "coda_lang", "check", "-"]
    for wait in (1.0, 5.0, 20.0):  # until it has started, on a busy machine too
        # A shell's background jobs ignore interrupts, and so would what is started from one.
        listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=listening)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        if process.returncode == cli.INTERRUPTED:
            break
    assert process.returncode == cli.INTERRUPTED and "Traceback" not in err and out == ""


def test_a_bug_says_so_and_saves_what_it_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from coda_lang import passes

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(passes, "run", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cli.main(["check", str(SWIGLU)]) == cli.BUG
    said = capfd.readouterr().err
    assert "this is a bug in codac" in said and "Traceback" not in said
    (saved,) = tmp_path.iterdir()
    text = saved.read_text()
    assert str(saved) in said and "swiglu" in text and "ZeroDivisionError: oh" in text


# --- promises ----------------------------------------------------------------------------------------------------------------------


def _seconds(bytecode: Path, *command: object) -> float:
    """Processor time of the quickest of a few runs: what a run takes on an idle machine, however busy this one is.

    With its bytecode kept in a folder, as an installed package has it, whatever the environment says of writing it.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    times = []
    for _ in range(4):
        before = os.times()
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=kept, check=True, capture_output=True, timeout=60)
        after = os.times()
        times.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(times)


@pytest.mark.slow
def test_checking_and_emitting_are_quick(tmp_path: Path) -> None:
    """Half a second and two seconds, on a machine that loads click and lark in 0.08 s; as much longer as a slower one takes for that."""
    bytecode, layer = tmp_path / "bytecode", ROOT / "specs" / "llama" / "layer.coda"
    slower = max(1.0, _seconds(bytecode, "-c", "import click, lark") / 0.08)
    for source in (SWIGLU, layer):
        assert _seconds(bytecode, "-m", "coda_lang", "check", source) < 0.5 * slower
        assert _seconds(bytecode, "-m", "coda_lang", source, "-o", tmp_path / "k.py") < 2.0 * slower


@pytest.mark.parametrize("command", [["check", str(SWIGLU)], [str(SWIGLU), "-o", "-"]], ids=["check", "emit"])
def test_neither_torch_nor_cutlass_is_loaded(command: list[str]) -> None:
    loaded = "', '.join({'torch', 'cutlass', 'tvm_ffi', 'numpy'} & set(sys.modules))"
    code = f"import sys; from coda_lang.cli import main; main({command!r}); sys.exit({loaded} or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gradients_are_checked_at_the_shape_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from coda_lang import gradcheck
    from coda_lang.source import Source

    (program,) = driver.programs(str(SWIGLU))
    given: list[dict[str, int]] = []
    monkeypatch.setattr(gradcheck, "check", lambda program, extents, seed, strict: given.append(dict(extents)) or ())
    list(driver.gradient_check(str(SWIGLU), seed=0, extents={"m": 3, "d": 5, "lane": 2, "other": 1}))
    assert given == [{"m": 3, "d": 5}]
    renamed = Source("p.coda", "program p(x: bf16[m, d]) -> (y: bf16[m, n])\ny = rename[d -> n](2 * x)\n")
    (program,) = driver.programs(renamed)
    assert gradcheck.default_extents(program, {"n": 7})["d"] == gradcheck.default_extents(program, {"d": 7})["n"] == 7
