"""The command `codac`: reads the command line, calls the driver, prints. Non-goals: any decision about programs.

Exit status: 0 done; 1 the source is refused (or a check found a difference); 2 the command line or a file is at fault;
70 a bug of codac; 130 interrupted; 141 the reader of a pipe went away.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from . import driver
from .diagnostics.model import CodaError, Diagnostic, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .source import Source

OK, REFUSED, USAGE, BUG, INTERRUPTED, PIPE = 0, 1, 2, 70, 130, 141


class Codac(click.Group):
    """A group whose default command is `emit`: `codac FILE -o kernel.py`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            if args[0].isalpha() and not os.path.exists(args[0]):
                near = _near(args[0], self.commands, f"the commands are {', '.join(self.commands)}")
                raise click.UsageError(f"there is no command and no file {args[0]}; {near}", ctx)
            args = ["emit", *args]
        return super().parse_args(ctx, args)


def _pairs(kind: Callable[[str], Any], example: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, Any]]:
    """A reader of repeated NAME=VALUE options."""

    def read(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for value in values:
            name, equals, right = value.partition("=")
            try:
                if not (name.strip() and equals):
                    raise ValueError
                parsed = kind(right.strip())
            except ValueError:
                raise click.BadParameter(f"{value!r} is not of the form {example}", ctx, param) from None
            if name.strip() in pairs:
                raise click.BadParameter(f"{name.strip()} is given twice", ctx, param)
            pairs[name.strip()] = parsed
        return pairs

    return read


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how a source is to be read, gathered in one `driver.Options`."""
    import functools

    @click.argument("file")
    @click.option("--param", "params", multiple=True, callback=_pairs(float, "eps=1e-6"), metavar="NAME=VALUE", help="Set a param.")
    @click.option("--type", "types", multiple=True, callback=_pairs(str, "T=f16"), metavar="NAME=TYPE", help="Choose a generic type.")
    @click.option("--extent", "extents", multiple=True, callback=_pairs(int, "qh=16"), metavar="AXIS=SIZE", help="Fix an axis.")
    @click.option("--strict", is_flag=True, help="Use no law that moves a rounding point.")
    @functools.wraps(command)
    def wrapped(file: str, params: dict[str, float], types: dict[str, str], extents: dict[str, int], strict: bool, **rest: Any) -> Any:
        return command(file, driver.Options(params, types, strict, extents), **rest)

    return wrapped


@click.group(cls=Codac, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="coda-lang", message="codac %(version)s")
def cli() -> None:
    """Compile .coda programs to fused GEMM kernels for Hopper GPUs.

    \b
      codac FILE -o kernel.py     write the kernels of FILE as a Python module
      codac check FILE            say what is wrong with FILE
      codac explain CODE          explain an error code

    FILE may be - for standard input.
    """


@cli.command(short_help="Write the kernels of FILE as a Python module; the default command.")
@_options
@click.option("-o", "--output", required=True, metavar="KERNEL.PY", help="Where to write the module; - prints it.")
@click.option("--standalone", is_flag=True, help="Inline the runtime: the module then needs no coda_lang.")
def emit(file: str, options: driver.Options, output: str, standalone: bool) -> None:
    """Write the kernels of FILE as a Python module (`codac FILE -o kernel.py` is short for it)."""
    if output != "-" and os.path.realpath(output) == os.path.realpath(file):
        raise click.UsageError("the output would overwrite the source; give -o another name")
    text = driver.emit(driver.read_file(file), options, standalone=standalone)
    if output == "-":
        _print(text)
    else:
        driver.write(output, text)


@cli.command()
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON, for editors and scripts.")
def check(file: str, options: driver.Options, as_json: bool) -> int:
    """Say everything that is wrong with FILE, or which kernels its programs become."""
    try:
        source = driver.read_file(file)
        plans = driver.check(source, options)
    except CodaError as e:
        if not as_json:
            raise
        from .diagnostics.render import to_json

        _print(to_json(e) + "\n")
        return _status(e)
    if as_json:
        from .diagnostics.render import records

        found = [{"name": p.program.name, "kernels": len(p.launched)} for p in plans]
        warned = records(driver.warnings(source, options))
        _print(json.dumps({"diagnostics": warned, "programs": found}, indent=1, ensure_ascii=False) + "\n")
    else:
        _warn(source, options)
        for p in plans:
            count = len(p.launched)
            _print(f"{p.program.name}: {count} kernel{'s' * (count != 1)}\n")
    return OK


@cli.command()
@click.argument("name", required=False)
def ops(name: str | None) -> None:
    """List the operators and the prelude, or say all about NAME."""
    from . import listing

    if name is None:
        _print(listing.all_ops())
        return
    text = listing.page(name)
    if text is None:
        help = _near(name, listing.names(), "`codac ops` lists them all")
        raise CodaError([Diagnostic("C0803", f"no operator or prelude function is called {name}", help=help)])
    _print(text)


@cli.command()
@click.argument("code")
def explain(code: str) -> None:
    """Say what an error code means, with an example and its remedy."""
    from .diagnostics import catalog

    text = catalog.explain(code)
    if text is None:
        raise CodaError([Diagnostic("C0803", f"there is no error code {code}", help=catalog.near(code))])
    _print(text)


@cli.command()
@_options
@click.option("--shape", metavar="m=…,d=…", help="Tell schedules and the roofline of these extents; those left out are nominal.")
def plan(file: str, options: driver.Options, shape: str | None) -> None:
    """Tell which kernels FILE becomes, what they move, and what shapes they take."""
    from . import passes

    source = driver.read_file(file)
    extents = _shape(shape)
    plans = driver.plan(source, options)
    driver.check_axes(extents, {a.name for p in plans for a in p.program.axes if a.extent is None})
    _warn(source, options)
    parts = []
    for p in plans:
        parts += [passes.report(p), driver.launches(p)]
        parts += [driver.schedules(p, extents)] if extents else []
        parts += [passes.training_report.text(p), driver.launches(p, backward=True)] if p.derived else []
        parts += [driver.schedules(p, extents, backward=True)] if extents and p.derived else []
    _print("\n\n".join(text.rstrip() for text in parts if text) + "\n")


@cli.command()
@_options
@click.option("--after", metavar="PASS", help="The pass to stop after; `build` is before all of them. Default: the last.")
def ir(file: str, options: driver.Options, after: str | None) -> None:
    """Print the programs of FILE as the compiler sees them after a pass."""
    known = driver.stages()
    if after is not None and after not in known:
        raise CodaError([Diagnostic("C0803", f"there is no pass {after}", help=_near(after, known, f"the passes are {', '.join(known)}"))])
    _print(driver.ir_text(driver.read_file(file), after or known[-1], options))


@cli.command()
@_options
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder for the libraries, the manifest and the module.")
@click.option("--arch", default="sm_90a", show_default=True, help="The architecture to compile for.")
@click.option("--config", "configs", multiple=True, metavar="KEY", help="A tile configuration, or `all`. Default: a few for all shapes.")
@click.option(
    "--parts", type=click.IntRange(1, 4), multiple=True, metavar="N",
    help="Also with K in N parts, 1 for unfused (see schedules); those in default configurations, whatever --config says.",
)  # fmt: skip
@click.option("--sms", type=click.IntRange(8, 1024), metavar="N", help="The device's multiprocessors. Default: 132, an H200's.")
def build(file: str, options: driver.Options, output: str, arch: str, **chosen: Any) -> None:
    """Compile the kernels of FILE ahead of time, without a GPU, for coda_lang.load."""
    made = driver.build(driver.read_file(file), output, options, arch=arch, **chosen)
    for entry in made.entries:
        _print(f"{os.path.join(output, entry.file)}\n")


@cli.command()
@_options
@click.option("--shape", metavar="m=…,d=…", help="Extents of the free axes; those left out are chosen.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
def test(file: str, options: driver.Options, shape: str | None, seed: int) -> int:
    """Compare what FILE compiles to with FILE as written, in float64; on a Hopper GPU, the kernels too."""
    arguments = [*(("--shape", shape) if _shape(shape) else ()), "--seed", str(seed)]
    try:
        source = driver.read_file(file)
        status = driver.self_check(source, options, arguments)
        _print("gradients under every way to save:\n")
        found = []
        for good, line in driver.gradient_check(source, options, seed, _shape(shape)):
            _print(line + "\n")
            found.append(good)
        if found:
            _print("all gradients agree\n" if all(found) else f"{found.count(False)} of {len(found)} lines do not agree\n")
        return status if all(found) else REFUSED
    except SystemExit as e:  # it is a script's main
        raise click.UsageError(str(e.code)) from None


def _shape(text: str | None) -> dict[str, int]:
    """The extents in m=8192,d=4096."""
    from .backend_cute.binding import extents_in

    try:
        return extents_in(text or "")
    except ValueError as e:
        raise click.UsageError(str(e)) from None


@cli.command()
@_options
@click.option("--shape", metavar="m=…,d=…", help="Extents of the free axes; those left out are the nominal ones.")
@click.option("--most", type=click.IntRange(1), metavar="N", help="Configurations to try for each kernel.")
def tune(file: str, options: driver.Options, shape: str | None, most: int | None) -> None:
    """Find the fastest tiles for FILE at a shape, on a Hopper GPU, and keep them for later calls."""
    from . import tables

    with tables.bar() as progress:
        trials = driver.tune(driver.read_file(file), options, _shape(shape), most=most, progress=progress)
    _print(tables.trials(trials))


@cli.command()
@_options
@click.option("--shape", metavar="m=…,d=…", help="Extents of the free axes; those left out are the nominal ones.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as JSON.")
def bench(file: str, options: driver.Options, shape: str | None, as_json: bool) -> None:
    """Measure FILE at a shape, on a Hopper GPU: the calls, and each kernel against its roofline."""
    from . import tables

    found = driver.bench(driver.read_file(file), options, _shape(shape))
    _print(tables.json_of(found) if as_json else tables.reports(found))


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    """A remedy for a name that does not exist."""
    from .diagnostics.suggest import did_you_mean

    return did_you_mean(name, known) or otherwise


def _status(e: CodaError) -> int:
    """Files and the command line (C08) are a different fault from the program's text."""
    return USAGE if all(d.code.startswith("C08") for d in e.diagnostics) else REFUSED


def _colour() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _warn(source: Source, options: driver.Options) -> None:
    """Print what is accepted, but hardly meant; it is no part of the answer, nor of the exit status."""
    if found := driver.warnings(source, options):
        _report(CodaError(found, (source,)))


def _report(e: CodaError) -> None:
    from .diagnostics.render import render

    click.echo(render(e, color=_colour()), err=True)


def _bug(said: str) -> int:
    click.echo(f"this is a bug in codac, not in your program: {said}\nplease report it with that file", err=True)
    return BUG


def _print(text: str) -> None:
    """Write to standard output, whole, and say so where that fails."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the flush at exit must not fail again
        raise CodaError([Diagnostic("C0802", f"cannot write to standard output: {e.strerror}")]) from None


def main(args: list[str] | None = None) -> int:
    """Run `codac` on the given arguments (or the process's own) and return the exit status; prints instead of raising."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None where the caller closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no carets still gets the message
    try:
        try:
            code = cli.main(args=args, prog_name="codac", standalone_mode=False)
            return code if isinstance(code, int) else OK
        except click.exceptions.Exit as e:
            return e.exit_code
        except click.Abort:
            raise KeyboardInterrupt from None
        except BrokenPipeError:
            raise
        except click.ClickException as e:
            e.show()
            return USAGE
        except CodaError as e:
            _report(e)
            return _status(e)
        except InternalError as e:
            return _bug(str(e))
        except Exception as e:
            saved = driver.save_bug(lambda: " ".join(["codac", *(sys.argv[1:] if args is None else args)]))
            return _bug(f"{type(e).__name__}: {e}\nwhere it happened is saved in {saved}")
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE


def run() -> NoReturn:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
