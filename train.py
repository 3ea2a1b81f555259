"""
Train a small GPT under any norm_mode, and let it speak. The model is in geogpt.py, the data in prepare_data.py.

    python train.py                                          prepare the data if needed, train, print a sample
    python train.py --norm_mode peri --out_dir out-peri      the same under another residual update
    python train.py --data mybook.txt --max_iters 5000       your own text; or --data shakespeare
    python train.py --resume                                 go on where out_dir stopped
    python train.py --init_from out/best.pt --data mybook.txt --out_dir out-book --learning_rate 3e-4      fine-tune
    python train.py sample --out_dir out --prompt "def "     speak from a checkpoint
    python train.py compare --norm_mode pre,post,peri,geo --seed 1,2,3          train all alike, show one table
    python train.py probe --out_dir out                      what each layer does to the stream
    python train.py bench                                    time and memory of each mode against pre
    python train.py --help                                   every option with its default

A run leaves in out_dir: last.pt (all that a resume needs), best.pt (the weights with the lowest validation loss),
log.csv (one row per log_interval and evaluation) and config.json (what was run, with which versions).
Exit codes: 0 done; 1 the run failed (loss not finite, disk full); 2 the input was wrong; 130, 143 stopped by a signal.
"""
import signal

if __name__ == "__main__":  # importing torch takes seconds: a Ctrl-C meanwhile ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import csv
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import prepare_data
from geogpt import GEO_DECAYS, GPT, NORM_MODES, GPTConfig
from prepare_data import Parser, UserError, closest

# ----------------------------------------------------------------------------------------------------------------------
# Options: one dataclass; the command line, its help and its checks are made from it

def opt(default, help, low=None, high=None, choices=None, resumable=False):
    """
    One option: its advice, its range (low <= value <= high) or choices, and whether a resume may change it. A default
    of None is worked out when the run starts: the help says how.
    """
    return field(default=default, metadata=dict(help=help, low=low, high=high, choices=choices, resumable=resumable))


# What --size stands for. Tokens per update = batch_size x gradient_accumulation_steps x block_size.
# From 125M up (the paper's shapes) the head is untied: tied, a wide model starts with too high a logit for the token it
# has just read.
_LARGE = dict(block_size=512, dropout=0.0, tie_weights=False, max_iters=20_000, batch_size=32,
              gradient_accumulation_steps=8, warmup_iters=500, beta2=0.95, eval_interval=500)
SIZES = {
    "baby": dict(n_layer=4, n_head=4, n_embd=128, block_size=128, dropout=0.0, tie_weights=True, max_iters=1500,
                 batch_size=16, gradient_accumulation_steps=1, learning_rate=3e-3, warmup_iters=100, beta2=0.99,
                 eval_interval=250),
    "small": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2, tie_weights=True, max_iters=5000,
                  batch_size=64, gradient_accumulation_steps=1, learning_rate=1e-3, warmup_iters=100, beta2=0.99,
                  eval_interval=250),
    "125M": dict(n_layer=12, n_head=12, n_embd=768, learning_rate=6e-4, **_LARGE),
    "350M": dict(n_layer=24, n_head=16, n_embd=1024, learning_rate=3e-4, **_LARGE),
    "1.3B": dict(n_layer=24, n_head=16, n_embd=2048, learning_rate=2e-4, **_LARGE),
}


@dataclass
class Options:
    """All options of train.py. Names are nanoGPT's where it has one."""
    # where things are
    out_dir: str = opt("out", "folder of the run: checkpoints, log.csv, config.json", resumable=True)
    data: str = opt("python", "data set name, or path of a text file or folder: see prepare_data.py")
    tokenizer: str = opt("auto", "char, byte, gpt2 or any tiktoken name; auto is char for your texts")
    init_from: str = opt("", "start from the weights and tokenizer of this checkpoint (fine-tuning)")
    resume: bool = opt(False, "go on from last.pt in out_dir")
    overwrite: bool = opt(False, "replace the run that is in out_dir")
    # model
    size: str = opt(None, "preset of the options marked 'by size' (default: small on cuda, else baby)",
                    choices=tuple(SIZES))
    norm_mode: str = opt("geo", "how a sublayer's output enters the residual stream", choices=tuple(NORM_MODES))
    n_layer: int = opt(None, "blocks (by size)", 1, 10_000)
    n_head: int = opt(None, "attention heads per block (by size)", 1, 10_000)
    n_embd: int = opt(None, "width of the stream (by size)", 1, 10**6)
    block_size: int = opt(None, "tokens of context (by size)", 1, 10**6)
    dropout: float = opt(None, "0 for large texts, 0.1 to 0.3 for ones read many times over (by size)", 0.0, 0.999)
    entry_norm: bool = opt(True, "RMSNorm right after the embedding; False: without, as in most papers; geo needs it")
    geo_decay: str = opt("harmonic", "geo: how the step shrinks with depth", choices=tuple(GEO_DECAYS))
    geo_alpha: float = opt(1.0, "geo: step of the first block", 1e-6, 1e3)
    geo_max_angle: float = opt(math.pi / 4, "geo: most radians a sublayer may turn the stream; 0: no clamp", 0, math.pi)
    tie_weights: bool = opt(None, "share embedding and head; untied the head starts at zero (by size)")
    # optimisation
    optimizer: str = opt("adamw", "muon takes the hidden matrices, with adamw for the rest", choices=("adamw", "muon"))
    max_iters: int = opt(None, "updates in all (by size)", 0, 10**9, resumable=True)
    batch_size: int = opt(None, "sequences per micro-step; lower it when memory runs out (by size)", 1, 10**6)
    gradient_accumulation_steps: int = opt(None, "micro-steps per update, to keep the batch (by size)", 1, 10**6)
    learning_rate: float = opt(None, "peak rate; try a third and three times of it (by size)", 0.0, 1e3)
    min_lr: float = opt(None, "rate at the end of the cosine (default: learning_rate / 10)", 0.0, 1e3)
    warmup_iters: int = opt(None, "steps of linear warmup (by size)", 0, 10**9)
    lr_decay_iters: int = opt(None, "step at which the cosine ends (default: max_iters)", 1, 10**9)
    weight_decay: float = opt(0.1, "on matrices; gains never decay", 0.0, 1e3)
    beta1: float = opt(0.9, "AdamW, memory of the gradient", 0.0, 0.9999999)
    beta2: float = opt(None, "AdamW, memory of its square; 0.99 for small batches (by size)", 0.0, 0.9999999)
    grad_clip: float = opt(1.0, "largest gradient norm, 0 for no clipping", 0.0, 1e9)
    seed: int = opt(1337, "of weights, batches and dropout, or of the sampled text", 0, 2**31 - 1)
    # evaluation and logging
    eval_interval: int = opt(None, "steps between evaluations, each of which saves (by size)", 1, 10**9, resumable=True)
    eval_iters: int = opt(50, "batches per evaluation; 0 is the whole validation set", 0, 10**9, resumable=True)
    eval_only: bool = opt(False, "evaluate the model the run would start from; writes nothing", resumable=True)
    log_interval: int = opt(10, "steps between rows of log.csv", 1, 10**9, resumable=True)
    sample_interval: int = opt(0, "steps between samples printed on the way, 0 for none", 0, 10**9, resumable=True)
    # sampling
    prompt: str = opt("", "text to continue, or FILE:prompt.txt", resumable=True)
    num_samples: int = opt(3, "texts to print; 0 for none", 0, 10**6, resumable=True)
    max_new_tokens: int = opt(300, "length of each", 0, 10**7, resumable=True)
    temperature: float = opt(0.8, "0: greedy, 1: the model's own distribution", 0.0, 1e6, resumable=True)
    top_k: int = opt(200, "sample among the k likeliest tokens, 0 for all", 0, 10**9, resumable=True)
    top_p: float = opt(1.0, "and among the likeliest that reach this probability together", 0, 1, resumable=True)
    # machine
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the first of cuda, mps, cpu", resumable=True)
    dtype: str = opt("auto", "of the matrix products; auto is bfloat16 on a cuda that has it, else float32",
                     choices=("auto", "float32", "bfloat16", "float16"))
    compile: bool = opt(None, "torch.compile: slow to start, faster after (default: on cuda only)", resumable=True)
    profile: bool = opt(False, "bench: leave a trace of each mode in out_dir, and show its ten dearest operations")


# The options that each command takes.
MODEL_OPTIONS = [f.name for f in fields(Options) if f.name in GPTConfig.__dataclass_fields__]
SAMPLING_OPTIONS = ["prompt", "num_samples", "max_new_tokens", "temperature", "top_k", "top_p"]
ONE_RUN_OPTIONS = ["init_from", "resume", "eval_only", "sample_interval", *SAMPLING_OPTIONS]
COMMAND_OPTIONS = {
    "train": [f.name for f in fields(Options) if f.name != "profile"],
    "sample": ["out_dir", *SAMPLING_OPTIONS, "seed", "device", "dtype"],
    "compare": [f.name for f in fields(Options) if f.name not in (*ONE_RUN_OPTIONS, "profile")],
    "probe": ["out_dir", "data", "tokenizer", "size", *MODEL_OPTIONS, "batch_size", "seed", "device"],
    "bench": ["out_dir", "size", *MODEL_OPTIONS, "optimizer", "max_iters", "batch_size", "gradient_accumulation_steps",
              "seed", "device", "dtype", "compile", "profile"],
}
# Where an option means something else to a command, or has another default: its advice there.
COMMAND_HELP = {
    "probe": {"out_dir": "a run's folder (default: out); for a fresh model where to write (default: out-probe-MODE)"},
    "bench": {"out_dir": "folder for bench.csv and bench_parts.csv (default: out)",
              "norm_mode": "one or a list, as in pre,geo (default: all)",
              "max_iters": "turns, each a step of every mode (default: 30)",
              "compile": "one or both, as in False,True (default: on cuda only)"},
}


def parse_value(f, text):
    """The value that `text` gives to option f; UserError names the value and the remedy."""
    kind, meta = f.type, f.metadata
    if text.lower() == "auto" and f.default is None:
        return None
    try:
        if kind is bool:
            value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        elif kind is int:
            value = whole(text)
        else:
            value = kind(text)
    except (ValueError, KeyError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "True or False"}[kind]
        raise UserError(f"--{f.name} {text!r} is not {wanted}") from None
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"--{f.name} {text!r} is none of {', '.join(meta['choices'])}{closest(text, meta['choices'])}")
    if meta["low"] is not None and not meta["low"] <= value <= meta["high"]:  # this refuses nan too
        raise UserError(f"--{f.name} {text} is out of range; it must be from {meta['low']:g} to {meta['high']:g}")
    return value


def parse_list(f, text):
    """"a,b,c" -> the values of option f, each once; a path that holds a comma is one value, and so is --out_dir."""
    parts = [text] if f.name == "out_dir" or (f.name == "data" and os.path.exists(text)) else text.split(",")
    values = list(dict.fromkeys(parse_value(f, part) for part in parts))
    if f.name == "overwrite" and len(values) > 1:
        raise UserError(f"--overwrite {text} must be one value")
    return values


def whole(text):
    """"12" or "1e4" -> int; ValueError for what is no whole number."""
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdigit() else int(value)


def parse_args(argv):
    """argv -> (command, {option: value} of those given). UserError for whatever cannot be understood."""
    command, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("train", argv)
    if command not in COMMANDS:
        raise UserError(f"no command {command!r}; it is one of {', '.join(COMMANDS)}{closest(command, COMMANDS)}")
    own = [f for f in fields(Options) if f.name in COMMAND_OPTIONS[command]]
    parser = Parser(prog=f"train.py {command}", description=COMMANDS[command].__doc__, allow_abbrev=False,
                    usage=f"python train.py {command} [--option value ...]",
                    epilog="Commands: " + ", ".join(COMMANDS) + ". See the top of train.py for examples.")
    for f in own:
        default = "" if f.default is None or f.default == "" else f" (default: {f.default:.4g})" \
            if isinstance(f.default, float) else f" (default: {f.default})"
        choices = f": {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else ""
        flag = {"nargs": "?", "const": "True"} if f.type is bool else {}  # a bare --resume is --resume True
        text = COMMAND_HELP.get(command, {}).get(f.name, f.metadata["help"] + choices + default)
        parser.add_argument(f"--{f.name}", metavar=f.type.__name__, default=argparse.SUPPRESS, **flag,
                            help=text.replace("%", "%%"))
    # --k v becomes --k=v, so that values such as -1e-3 or "- a list" are not taken for options
    joined = []
    for word in argv:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and not word.startswith("--"):
            joined[-1] += "=" + word
        else:
            joined.append(word)
    found, unknown = parser.parse_known_args(joined)
    if unknown:
        word = unknown[0].split("=")[0]
        belongs = [other for other, names in COMMAND_OPTIONS.items() if word.removeprefix("--") in names]
        hint = f"; it belongs to {' and '.join(belongs)}" if belongs else closest(word, [f"--{f.name}" for f in own])
        raise UserError(f"train.py {command} has no option {word}{hint}; see --help")
    texts = [(f, getattr(found, f.name)) for f in own if f.name in found]
    if command in ("compare", "bench"):
        return command, {f.name: parse_list(f, text) for f, text in texts}
    return command, {f.name: parse_value(f, text) for f, text in texts}


def resolve(given):
    """Options from those given: presets, defaults that depend on others, and paths made absolute."""
    o = Options(**given)
    o.size = o.size or ("small" if pick_device(o.device).type == "cuda" else "baby")
    for name, value in SIZES[o.size].items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    o.min_lr = o.learning_rate / 10 if o.min_lr is None else o.min_lr
    o.lr_decay_iters = o.lr_decay_iters or max(o.max_iters, 1)
    o.data = absolute(o.data)
    return o


def absolute(data):
    """--data with a path made absolute, so that a resume finds it from anywhere; names of data sets stay."""
    return os.path.abspath(data) if data and data not in prepare_data.DATASETS and os.path.exists(data) else data


# ----------------------------------------------------------------------------------------------------------------------
# Machine

def pick_device(name):
    """torch.device for --device; UserError where this machine has none such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, colon, index = name.partition(":")
    index = index if colon else "0"
    known = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in known:
        raise UserError(f"--device {name!r} is none of cpu, cuda, mps{closest(kind, known)}")
    if not re.fullmatch("[0-9]{1,3}", index) or int(index) >= known[kind]:
        raise UserError(f"--device {name}: torch {torch.__version__} sees no such device; use cpu or auto")
    return torch.device(name)


def autocast(device, dtype):
    """(context for the matrix products, name of the dtype) for --dtype on this device."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) \
            else "float32"
    if dtype == "float32":
        return nullcontext(), dtype
    return torch.autocast(device.type, getattr(torch, dtype)), dtype


class Stopped(KeyboardInterrupt):
    """A signal ended the command; `code` is what the process exits with (128 + signal number)."""

    def __init__(self, message, number):
        super().__init__(message)
        self.code = 128 + number


def raise_stopped(number, frame):
    raise Stopped("stopped", number)


@contextmanager
def signals_as_flag():
    """Within, the first Ctrl-C or SIGTERM only sets a flag, for the loop to leave at a step boundary; the next one
    ends the process at once. Yields a list that holds the signal's number once it came."""
    came, previous = [], {}

    def handler(number, frame):
        came.append(number)
        signal.signal(number, raise_stopped)
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, handler)
    try:
        yield came
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


# ----------------------------------------------------------------------------------------------------------------------
# Files of a run

def write_atomically(path, write):
    """write(temporary file) and rename: whoever reads `path` finds the old content or the new, never a half."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:
        cause = e if isinstance(e, OSError) else e.__context__  # torch.save reports a full disk as an error of its own
        if not isinstance(cause, OSError):
            raise
        raise file_error(cause, path) from None
    finally:
        temporary.unlink(missing_ok=True)


def file_error(e, path):
    """UserError for an OSError about path: a failing disk is a failed run, any other reason is for the user to mend."""
    failed = e.errno in prepare_data.DISK_ERRORS
    remedy = "make room, then go on with --resume" if failed else "choose another folder"
    return UserError(f"cannot use {path} ({e.strerror or e}); {remedy}", code=1 if failed else 2)


def load_checkpoint(path):
    """The dictionary in a checkpoint; UserError where it is missing, cut short or no checkpoint of ours."""
    if not Path(path).is_file():
        raise UserError(f"no checkpoint {path}; train one first, or name its folder with --out_dir")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        good = (isinstance(checkpoint["model"], dict) and isinstance(checkpoint["model_config"], dict)
                and isinstance(checkpoint["tokenizer"], dict) and type(checkpoint["step"]) is int)
    except Exception:  # torch reports a bad file by half a dozen types, and in paragraphs
        good = False
    if not good:
        raise UserError(f"{path} cannot be read as a GeoGPT checkpoint; it was cut short or written by another program")
    return checkpoint


def load_model(checkpoint, path, **changes):
    """(GPT, Tokenizer) of a checkpoint, on the CPU; `changes` to its config that leave the weights' shapes alone."""
    try:
        model = GPT(GPTConfig(**{**checkpoint["model_config"], **changes}))
        model.load_state_dict(checkpoint["model"])
        tokenizer = prepare_data.tokenizer_from_spec(checkpoint["tokenizer"])
        if tokenizer.vocab_size != model.config.vocab_size:
            raise ValueError(f"its tokenizer has {tokenizer.vocab_size} ids and its model {model.config.vocab_size}")
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError("its weights are not finite")
        return model, tokenizer
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as e:
        raise UserError(f"{path} is damaged or of another model: {' '.join(str(e).split())[:200]}") from None


def write_json(path, content):
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=1).encode()))


def write_csv(path, columns, rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *([row[c] for c in columns] for row in rows)])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def read_csv(path, columns, convert):
    """Rows of a CSV file as dictionaries, each cell through convert(column, text); UserError where that fails."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [{name: convert(name, row[name]) for name in columns} for row in csv.DictReader(file)]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged; mend or delete it, or give --overwrite") from None


def read_log(path):
    """Rows of a log.csv, numbers as numbers and empty cells as None."""
    return read_csv(path, LOG_COLUMNS, lambda column, text: float(text) if text else None)


def read_json(path):
    """The content of a JSON file; UserError where there is none in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged; delete it, or give --overwrite") from None


def versions():
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}


LOG_COLUMNS = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_s")


class Log:
    """log.csv: `step` counts the updates made; loss and grad_norm are means since the row before."""

    def __init__(self, path, before_step):
        """Open the file for more rows. Of those it has, the ones of steps < before_step stay: the rest is run again."""
        lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
        whole_row = re.compile(r"([0-9]{1,12})" + r",[0-9.e+-]*" * (len(LOG_COLUMNS) - 1))
        kept = [line for line in lines if (row := whole_row.fullmatch(line)) and int(row[1]) < before_step]
        text = "".join(line + "\n" for line in [",".join(LOG_COLUMNS), *kept])
        write_atomically(path, lambda file: file.write(text.encode()))
        self.file = open(path, "a", newline="")

    def add(self, **row):
        csv.writer(self.file, lineterminator="\n").writerow([row.get(column, "") for column in LOG_COLUMNS])
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()


def lock(out_dir):
    """Keep a second run out of out_dir for as long as the returned file is open; a killed run leaves no lock behind."""
    file = open(out_dir / ".lock", "w")
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is writing to {out_dir}; wait for it or choose another --out_dir") from None
    except OSError:  # a file system without locks
        pass
    return file


def marks(out_dir):
    """The checkpoints that a folder holds, and when they were written: {name: nanoseconds}."""
    paths = [Path(out_dir) / name for name in ("last.pt", "best.pt")]
    return {path.name: path.stat().st_mtime_ns for path in paths if path.exists()}


# ----------------------------------------------------------------------------------------------------------------------
# Training

class NotFinite(UserError):
    """The loss or the gradient is not finite any more: the run has failed."""


def get_lr(step, o):
    """Learning rate of update number `step` (from 0): linear warmup, then a cosine from learning_rate to min_lr."""
    warmup = min(o.warmup_iters, o.lr_decay_iters)
    if step < warmup:
        return o.learning_rate * (step + 1) / warmup
    if step >= o.lr_decay_iters:
        return o.min_lr
    progress = (step - warmup) / (o.lr_decay_iters - warmup)
    return o.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (o.learning_rate - o.min_lr)


def get_batch(tokens, step, o):
    """
    All sequences of update number `step`: (x, y), each (batch_size * gradient_accumulation_steps, T) int64, y one token
    ahead of x. A pure function of seed and step: a resumed run, and one that splits the batch otherwise, see the same.
    """
    rng = np.random.default_rng((o.seed, step))
    starts = rng.integers(len(tokens) - o.block_size, size=o.batch_size * o.gradient_accumulation_steps)
    window = torch.from_numpy(tokens.windows(starts, o.block_size + 1))
    return window[:, :-1], window[:, 1:]


def eval_batches(tokens, o):
    """
    The batches an evaluation is made of, the same every time and for every seed: windows drawn by a generator of its
    own, or, for eval_iters = 0, all of the tokens, cut into windows that predict each but the first one exactly once.
    """
    T, last = o.block_size, len(tokens) - 1
    if o.eval_iters:
        starts = np.random.default_rng(0).integers(len(tokens) - T, size=o.eval_iters * o.batch_size)
    else:
        starts = np.arange(0, last - T + 1, T)
    for i in range(0, len(starts), o.batch_size):
        yield torch.from_numpy(tokens.windows(starts[i:i + o.batch_size], T + 1))
    if not o.eval_iters and last % T:  # what is left, shorter than a window
        yield torch.from_numpy(tokens.windows(np.array([last - last % T]), last % T + 1))


def seed_step(seed, step):
    """Every random draw of a step (dropout) follows from seed and step alone, not from what was drawn before."""
    torch.manual_seed(int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> 1))


class Run:
    """A model being trained: all that changes from step to step, and the one update that changes it."""

    def __init__(self, o, model, tokenizer, tokens, data):
        """
        o: Options, resolved; model: GPT, on any device; tokenizer: its Tokenizer; tokens: {"train": TokenStream, "val":
        TokenStream}; data: what a resume must find unchanged of them, a dictionary.
        """
        self.o, self.tokenizer, self.tokens, self.data, self.step = o, tokenizer, tokens, data, 0
        self.device = pick_device(o.device)
        self.autocast, self.dtype = autocast(self.device, o.dtype)
        self.model = model.to(self.device)
        self.compiled = o.compile if o.compile is not None else self.device.type == "cuda"
        self.forward = torch.compile(self.model) if self.compiled else self.model
        self.optimizers = self.model.configure_optimizer(o.learning_rate, o.weight_decay, (o.beta1, o.beta2),
                                                         o.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == "float16")
        self.best_val = math.inf
        self.tokens_per_step = o.batch_size * o.gradient_accumulation_steps * o.block_size
        self.pending = []  # (step, loss, gradient norm) of updates not yet logged, as tensors on the device

    def update(self, done=lambda part: None):
        """
        Exactly one update, from the batch of this step. Reads nothing back from the device. done(part) is called after
        each part of the step, "data", "forward", "backward" or "optimizer", for a bench that times them.
        """
        o = self.o
        seed_step(o.seed, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(self.step, o)
        loss_sum = 0.0
        x, y = (self.to_device(part) for part in get_batch(self.tokens["train"], self.step, o))
        done("data")
        for x_micro, y_micro in zip(x.split(o.batch_size), y.split(o.batch_size)):
            with self.autocast:
                _, loss = self.forward(x_micro, y_micro)
            loss = loss / o.gradient_accumulation_steps
            done("forward")
            self.scaler.scale(loss).backward()
            loss_sum = loss_sum + loss.detach()
            done("backward")
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), o.grad_clip or math.inf)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        done("optimizer")
        self.pending.append((self.step, loss_sum, norm))
        self.step += 1

    def to_device(self, ids):
        if self.device.type == "cuda":  # pinned memory lets the copy overlap with the step before
            return ids.pin_memory().to(self.device, non_blocking=True)
        return ids.to(self.device)

    def losses(self):
        """[(step, loss, gradient norm), ...] of the updates since the last log row. NotFinite if one is not."""
        fresh = [row for row in self.pending if torch.is_tensor(row[1])]
        if fresh:  # one read for all of them
            values = torch.stack([torch.stack((loss, norm)) for _, loss, norm in fresh]).tolist()
            self.pending[-len(fresh):] = [(step, *numbers) for (step, _, _), numbers in zip(fresh, values)]
        for step, loss, norm in self.pending:
            # fp16's scaler finds its scale by overflowing: it skips such a step, which is no error
            if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
                what = "gradient" if math.isfinite(loss) else "loss"
                raise NotFinite(f"the {what} of step {step} is not finite; the last good checkpoint was left alone; "
                                "lower --learning_rate or raise --warmup_iters", code=1)
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1e-4:  # from 65536, halved by each step skipped
            raise NotFinite(f"float16's loss scale has fallen to nothing by step {self.step}: no gradient is finite; "
                            "use --dtype bfloat16 or lower --learning_rate", code=1)
        return self.pending

    @torch.no_grad()
    def estimate_loss(self, split="val"):
        """Mean cross-entropy in nats per token over eval_batches, weighted by tokens."""
        self.model.eval()
        losses, counts = [], []
        for window in eval_batches(self.tokens[split], self.o):
            window = self.to_device(window)
            x, y = window[:, :-1], window[:, 1:]
            # the odd last window would make torch.compile start over for its shape
            forward = self.forward if x.shape == (self.o.batch_size, self.o.block_size) else self.model
            with self.autocast:
                _, loss = forward(x, y)
            losses.append(loss)
            counts.append(y.numel())
        self.model.train()
        return float(np.average(torch.stack(losses).tolist(), weights=counts))

    def state(self):
        """What a resume needs beyond the weights, as plain data and tensors."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict(), "best_val": self.best_val, "pending": self.losses()}

    def load_state(self, checkpoint):
        for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.step, self.best_val = checkpoint["step"], float(checkpoint["best_val"])
        self.pending = [(int(step), float(loss), float(norm)) for step, loss, norm in checkpoint["pending"]]


def save(run, name):
    """Write out_dir/name: best.pt speaks and can be fine-tuned, last.pt can be resumed too."""
    content = {"model": run.model.state_dict(), "model_config": asdict(run.model.config),
               "tokenizer": run.tokenizer.spec(), "step": run.step, "versions": versions()}
    if name == "last.pt":
        content |= {**run.state(), "options": asdict(run.o), "data": run.data}
    write_atomically(Path(run.o.out_dir) / name, lambda file: torch.save(content, file))


def stopped(run, number):
    return Stopped(f"stopped by a signal at step {run.step} and saved; go on with: "
                   f"python train.py --resume --out_dir {run.o.out_dir}", number)


def say(text):
    """Print a line without tearing a progress bar."""
    tqdm.write(text)
    sys.stdout.flush()  # a pipe would hold plain lines back


class Progress:
    """The run as a person sees it: a live bar on a terminal, plain lines where the output is none."""

    def __init__(self, o, first_step, description):
        self.total, self.first, self.shown = o.max_iters, first_step, {}
        self.began = time.perf_counter()  # moved on by the time that evaluations take, which is not training
        self.bar = tqdm(total=o.max_iters, initial=first_step, desc=description, unit="step", dynamic_ncols=True,
                        disable=None, leave=not description)
        self.name = f"{description}, " if description else ""

    def rate(self, step):
        """Updates per second so far, 0 before the first one."""
        return (step - self.first) / max(time.perf_counter() - self.began, 1e-9)

    def show(self, step, row, tokens_per_step):
        """Take up one row of log.csv; a row with an evaluation becomes a line."""
        for name, column in (("loss", "loss"), ("val", "val_loss")):
            self.shown[name] = f"{float(row[column]):.4f}" if column in row else self.shown.get(name, "-")
        self.bar.set_postfix(self.shown | {"tok/s": f"{self.rate(step) * tokens_per_step:,.0f}"})
        if "val_loss" in row:
            line = f"{self.name}step {step:>6}: loss {self.shown['loss']}, val {self.shown['val']}"
            if step > self.first:  # there is a speed to speak of
                left = tqdm.format_interval((self.total - step) / self.rate(step))
                line += f", {self.rate(step) * tokens_per_step:,.0f} tokens/s, {left} left"
            say(line)


def fit(run, log, description=None):
    """
    Train up to max_iters updates; returns the last validation loss. At the top of a step evaluate, save and sample when
    due, leave if it was the last, then make exactly one update. A signal saves at the next boundary and raises Stopped.
    """
    o, progress = run.o, Progress(run.o, run.step, description)
    run.model.train()
    with progress.bar, signals_as_flag() as signals:
        while True:
            last, row = run.step >= o.max_iters, {}
            if signals:
                save(run, "last.pt")
                raise stopped(run, signals[0])
            if last or run.step % o.eval_interval == 0:
                run.losses()  # waits for the device, and raises NotFinite before anything is saved
                paused = time.perf_counter()
                val_loss = run.estimate_loss()
                if not math.isfinite(val_loss):  # the last update itself has overflowed
                    raise NotFinite(f"the validation loss after {run.step} steps is not finite; the last good "
                                    "checkpoint was left alone; lower --learning_rate", code=1)
                if val_loss < run.best_val:
                    run.best_val = val_loss
                    save(run, "best.pt")
                # Before the row is written and `pending` emptied: a resume begins right here and does both again.
                save(run, "last.pt")
                row["val_loss"] = f"{val_loss:.6f}"
                progress.began += time.perf_counter() - paused
            if run.pending and (last or run.step % o.log_interval == 0):
                losses, run.pending = run.losses(), []
                row |= {"loss": f"{np.mean([loss for _, loss, _ in losses]):.6f}",
                        "lr": f"{get_lr(run.step - 1, o):.6g}",
                        "grad_norm": f"{np.mean([norm for _, _, norm in losses]):.6f}",
                        "tokens_per_s": f"{progress.rate(run.step) * run.tokens_per_step:.0f}"
                        if run.step > progress.first else ""}
            if row:
                log.add(step=run.step, **row)
                progress.show(run.step, row, run.tokens_per_step)
            if o.sample_interval and run.step % o.sample_interval == 0 and not last:
                for text in speak(run.model, run.tokenizer, o):
                    say(text)
            if last and signals:
                raise stopped(run, signals[0])
            if last:
                return val_loss
            run.update()
            progress.bar.update()


# ----------------------------------------------------------------------------------------------------------------------
# Sampling

def prompt_ids(tokenizer, prompt):
    """Token ids (1, n), n >= 1, of --prompt; an empty one is a line break, or token 0 where the alphabet has none."""
    if prompt.startswith("FILE:"):
        prompt = prepare_data.read_text(prompt.removeprefix("FILE:"))
    try:  # under LC_ALL=C what is not ASCII arrives byte by byte, as surrogates
        prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UserError(f"--prompt {ascii(prompt)} is no UTF-8; give it as FILE:prompt.txt in that encoding") from None
    if not prompt:
        try:
            ids = tokenizer.encode("\n")
        except UserError:
            ids = [0]
    else:
        ids = tokenizer.encode(prompt)
    return torch.tensor(np.asarray(ids, dtype=np.int64))[None]


def speak(model, tokenizer, o):
    """Yield num_samples texts: the prompt and its continuation. One seed gives one sequence of texts."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(o.seed)
    ids = prompt_ids(tokenizer, o.prompt).to(device)
    for _ in range(o.num_samples):
        with autocast(device, o.dtype)[0]:
            out = model.generate(ids, o.max_new_tokens, o.temperature, o.top_k, o.top_p, generator)
        yield tokenizer.decode(out[0].tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Commands

RUN_FILES = ("last.pt", "best.pt", "log.csv", "config.json")


def resumed_options(given, checkpoint, path):
    """The options of the run in a checkpoint, with those given now where a resume may change them."""
    try:
        o = Options(**checkpoint["options"])
        for f in fields(Options):  # as strict as with a command line
            value = getattr(o, f.name)
            if value is not None or f.name != "compile":  # the one that stays open: it depends on the device
                setattr(o, f.name, parse_value(f, str(value)))
    except (KeyError, TypeError, UserError):
        raise UserError(f"{path} cannot be resumed: its options are missing or damaged; use --init_from") from None
    if "data" in given:
        given = given | {"data": absolute(given["data"])}
    for f in fields(Options):
        if f.name not in given or f.name == "resume" or given[f.name] == getattr(o, f.name):
            continue
        if not f.metadata["resumable"]:
            raise UserError(f"--{f.name} {given[f.name]} contradicts {path}, which has {getattr(o, f.name)}; leave it "
                            "out, or start a new run in another --out_dir")
        setattr(o, f.name, given[f.name])
    o.resume, o.out_dir = True, given.get("out_dir", "out")
    return o


def finetune_options(o, given, checkpoint, path):
    """Take the model's shape and mode from a checkpoint; block_size and dropout alone may differ."""
    for name in MODEL_OPTIONS:
        theirs = checkpoint["model_config"].get(name)
        if name in given and name not in ("block_size", "dropout") and given[name] != theirs:
            raise UserError(f"--{name} {given[name]} contradicts {path}, which has {theirs}; leave it out")
        if name not in given and name != "dropout":
            setattr(o, name, theirs)
    if given.get("tokenizer", "auto") not in ("auto", checkpoint["tokenizer"].get("name")):
        raise UserError(f"--tokenizer {given['tokenizer']} contradicts {path}: fine-tuning keeps the checkpoint's own")


def load_splits(folder, o):
    """
    ({"train": TokenStream, "val": TokenStream}, fingerprint) of a prepared folder. UserError where one is too short for
    block_size. The fingerprint, a small dictionary, tells a resume whether it goes on with the same data.
    """
    tokens = {split: prepare_data.load_tokens(folder, split) for split in ("train", "val")}
    for split, stream in tokens.items():
        if len(stream) <= o.block_size:
            raise UserError(f"the {split} split of {o.data} has {len(stream)} tokens, too few for --block_size "
                            f"{o.block_size}; lower it to {max(len(stream) - 1, 0)} or less, or give more text")
    return tokens, {split: [len(stream), checksum(stream)] for split, stream in tokens.items()}


def checksum(stream):
    """CRC-32 of 64 stretches of a TokenStream, evenly spaced: all of a small text, and a sample of a large one."""
    length = min(len(stream), 4096)
    starts = np.linspace(0, len(stream) - length, 64).astype(np.int64)
    return zlib.crc32(stream.windows(starts, length).tobytes())


def model_config(o, vocab_size=1, vocab_multiple=1):
    """GPTConfig of the options' shape; UserError where they make no model."""
    try:
        return GPTConfig(vocab_size, vocab_multiple=vocab_multiple, **{n: getattr(o, n) for n in MODEL_OPTIONS})
    except ValueError as e:
        raise UserError(str(e)) from None


def new_model(o, tokenizer):
    """GPT of the options' shape for this tokenizer, initialised from the options' seed."""
    bpe = tokenizer.name not in ("char", "byte")  # 50257 pads up to 50304: a GPU's matrix units like multiples of 64
    model = GPT(model_config(o, tokenizer.vocab_size, 64 if bpe else 1))
    torch.manual_seed(o.seed)  # after the constructor: what a mode of your own draws there shifts nobody's start
    model.init_weights()
    return model


def start_run(given):
    """The Run of the train command: options settled, data prepared, model made. Leaves out_dir alone."""
    checkpoint, found = None, marks(given.get("out_dir", "out"))
    if given.get("resume"):
        if given.get("overwrite") or given.get("init_from"):
            raise UserError("--resume goes on with the run in out_dir; it does not go with --overwrite or --init_from")
        path = Path(given.get("out_dir", "out")) / "last.pt"
        checkpoint = load_checkpoint(path)
        o = resumed_options(given, checkpoint, path)
    else:
        o = resolve(given)
        if found and not o.overwrite and not o.eval_only:
            go_on = "--resume to go on with it, " if "last.pt" in found else ""
            raise UserError(f"{o.out_dir} holds a run already; give {go_on}--overwrite to replace it, or another "
                            "--out_dir")
        path = o.init_from
        if o.init_from:
            checkpoint = load_checkpoint(path)
            finetune_options(o, given, checkpoint, path)
    if checkpoint:
        model, tokenizer = load_model(checkpoint, path, block_size=o.block_size, dropout=o.dropout)
    folder = prepare_data.prepare(o.data, tokenizer if o.init_from else o.tokenizer, quiet=True)
    tokens, data = load_splits(folder, o)
    own_tokenizer = prepare_data.tokenizer_from_spec(prepare_data.read_meta(folder)["tokenizer"])
    if not checkpoint:
        tokenizer = own_tokenizer
        model = new_model(o, tokenizer)
    elif own_tokenizer.spec() != tokenizer.spec():
        raise UserError(f"the tokenizer of {folder} is not the one in {path}; the data has changed")
    run = Run(o, model, tokenizer, tokens, data)
    run.found = found
    if o.resume:
        if checkpoint.get("data") != data:
            raise UserError(f"the data in {folder} has changed since {path} was saved; its lengths and checksums were "
                            f"{checkpoint.get('data')} and are {data}")
        try:
            run.load_state(checkpoint)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError):
            raise UserError(f"{path} cannot be resumed, its optimizer's state is damaged; use --init_from") from None
    return run


def train(given):
    """Prepare the data if needed, train, print a sample. Presets: --size."""
    run = start_run(given)
    o, out_dir = run.o, Path(run.o.out_dir)
    prompt_ids(run.tokenizer, o.prompt)  # a prompt that cannot be read is told now, not after the training
    if o.eval_only:
        print(f"val loss {run.estimate_loss():.4f} at step {run.step}")
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    with lock(out_dir):
        if marks(out_dir) != run.found:  # looked at before the lock was ours
            raise UserError(f"another run has just written to {out_dir}; choose another --out_dir, or give --resume")
        if not o.resume:
            for name in RUN_FILES:
                (out_dir / name).unlink(missing_ok=True)
        about = {"options": asdict(o), "model": asdict(run.model.config), "parameters": run.model.num_params(),
                 "data": run.data, "device": str(run.device), "dtype": run.dtype, "versions": versions()}
        write_json(out_dir / "config.json", about)
        epochs = o.max_iters * run.tokens_per_step / len(run.tokens["train"])
        print(f"{o.norm_mode}, {run.model.num_params():,} parameters, on {run.device} in {run.dtype}; "
              f"{o.max_iters} steps read {len(run.tokens['train']):,} training tokens {epochs:.2f} times", flush=True)
        with Log(out_dir / "log.csv", before_step=run.step if o.resume else 0) as log:
            val_loss = fit(run, log)
    print(f"done: val loss {val_loss:.4f}, best {run.best_val:.4f}; python train.py sample --out_dir {o.out_dir}\n")
    print_samples(run.model, run.tokenizer, o)


def print_samples(model, tokenizer, o):
    """Print what `speak` yields, each text but the last with a line below."""
    for i, text in enumerate(speak(model, tokenizer, o), 1):
        print(text)
        if i < o.num_samples:
            print("-" * 80)


def sample(given):
    """Print texts from the best.pt, else the last.pt, in --out_dir."""
    o = Options(**given)
    folder = Path(o.out_dir)
    path = next((folder / name for name in ("best.pt", "last.pt") if (folder / name).exists()), folder / "best.pt")
    model, tokenizer = load_model(load_checkpoint(path), path)
    print_samples(model.to(pick_device(o.device)), tokenizer, o)


# ----------------------------------------------------------------------------------------------------------------------
# Comparing

RESULT_COLUMNS = {"variant": str, "learning_rate": float, "seed": int, "parameters": int, "start_loss": float,
                  "val_loss": float, "tokens_per_s": float}


def plan(lists):
    """
    The runs of a compare: {(variant, learning_rate, seed): given options}, the product of all lists. A variant is
    named by what tells it from the others; geo's own options make no variants of the other modes, and a combination
    that makes no model (geo without an entry norm, say) is left out.
    """
    varied = [name for name, values in lists.items() if len(values) > 1 and name not in ("learning_rate", "seed")]
    runs, refused = {}, None
    for values in itertools.product(*lists.values()):
        given = dict(zip(lists, values, strict=True))
        if given.get("norm_mode", "geo") != "geo":
            given = {name: value for name, value in given.items() if not name.startswith("geo_")}
        o = resolve(given)
        pick_device(o.device)
        try:
            model_config(o)
        except UserError as e:  # known now, not after hours
            refused = e
            print(f"left out: {e}")
            continue
        names = [str(given[n]) if n in ("norm_mode", "geo_decay") else f"{n}={given[n]}" for n in varied if n in given]
        runs.setdefault((" ".join(names) or o.norm_mode, o.learning_rate, o.seed), given)
    if not runs:
        raise refused
    return runs


def run_one(given, folder, description):
    """Train one run of a compare in its folder, or go on with it; returns its row of results.csv but for the name."""
    resuming = (folder / "last.pt").is_file()
    # overwrite: a run killed between its first best.pt and its first last.pt begins again
    run = start_run({**({"resume": True} if resuming else {**given, "overwrite": True}), "out_dir": str(folder)})
    folder.mkdir(parents=True, exist_ok=True)
    batch = probe_batch(run)
    if not resuming:
        write_json(folder / "probe-start.json", run.model.probe(*batch))
    with Log(folder / "log.csv", before_step=run.step) as log:
        try:
            val_loss = fit(run, log, description)
            write_json(folder / "probe-end.json", run.model.probe(*batch))
        except NotFinite:
            val_loss = math.nan
    if run.compiled:
        torch.compiler.reset()  # this run's code would count against torch's limit for the next one
    rows = read_log(folder / "log.csv")
    return {"learning_rate": run.o.learning_rate, "seed": run.o.seed, "parameters": run.model.num_params(),
            "start_loss": rows[0]["val_loss"], "val_loss": val_loss,
            "tokens_per_s": next((row["tokens_per_s"] for row in reversed(rows) if row["tokens_per_s"]), math.nan)}


def diverged(row):
    """A run has diverged if its loss is not finite, or ends at or above where it began."""
    return not row["val_loss"] < row["start_loss"]


def mean_sd(values):
    """Mean and sample standard deviation; nan for what too few values do not give."""
    return (np.mean(values) if len(values) else math.nan, np.std(values, ddof=1) if len(values) > 1 else math.nan)


def summarise(results):
    """
    Rows of results.csv -> one dictionary per variant, in order of appearance, at the variant's best learning rate: the
    one with the lowest mean loss among those with the fewest diverged runs.

    diff is the mean over common seeds of the variant's loss less the first variant's, diff_se its standard error.
    """
    summary, first = [], None
    for variant in dict.fromkeys(row["variant"] for row in results):
        by_rate = {}
        for row in results:
            if row["variant"] == variant:
                by_rate.setdefault(row["learning_rate"], []).append(row)

        def badness(rows):
            return sum(map(diverged, rows)), mean_sd([row["val_loss"] for row in rows if not diverged(row)])[0]
        rate, rows = min(by_rate.items(), key=lambda item: badness(item[1]))
        losses = {row["seed"]: row["val_loss"] for row in rows if not diverged(row)}
        speed = mean_sd([row["tokens_per_s"] for row in rows if math.isfinite(row["tokens_per_s"])])[0]
        first = first or (losses, speed)
        differences = [loss - first[0][seed] for seed, loss in losses.items() if seed in first[0]]
        mean, sd = mean_sd(list(losses.values()))
        diff, diff_sd = mean_sd(differences)
        summary.append({"variant": variant, "learning_rate": rate, "rates": sorted(by_rate),
                        "parameters": rows[0]["parameters"], "mean": mean, "sd": sd, "diff": diff,
                        "diff_se": diff_sd / math.sqrt(max(len(differences), 1)), "speed": speed / first[1],
                        "diverged": sum(map(diverged, rows)), "runs": len(rows),
                        "all_diverged": sum(diverged(row) for some in by_rate.values() for row in some),
                        "all_runs": sum(map(len, by_rate.values()))})
    return summary


def plus_minus(mean, spread, digits=4):
    """"1.6100 ± 0.0040"; the spread is left out, or the whole is "-", where it is not known."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" if math.isnan(spread) else f"{mean:.{digits}f} ± {spread:.{digits}f}"


def table(summary):
    """The Markdown table of a compare."""
    several_rates = any(len(row["rates"]) > 1 for row in summary)
    lines = [f"| variant | learning rate{' (best of)' if several_rates else ''} | parameters | val loss ± sd | "
             f"difference to {summary[0]['variant']} ± se | tokens/s ratio | diverged |",
             "|---|---|---|---|---|---|---|"]
    for i, row in enumerate(summary):
        rates = f" ({', '.join(f'{rate:g}' for rate in row['rates'])})" if several_rates else ""
        every = f"; {row['all_diverged']}/{row['all_runs']} at all rates" if several_rates else ""
        lines.append(f"| {row['variant']} | {row['learning_rate']:g}{rates} | {row['parameters']:,} | "
                     f"{plus_minus(row['mean'], row['sd'])} | "
                     f"{plus_minus(row['diff'], row['diff_se']) if i else '-'} | {row['speed']:.2f} | "
                     f"{row['diverged']}/{row['runs']}{every} |")
    return "\n".join(lines) + "\n"


def compare(lists):
    """
    Train every variant, learning rate and seed alike (same batches, same schedule, same draws of the initial weights)
    and show one table. Any option may be a list: --norm_mode pre,geo --seed 1,2,3 --learning_rate 1e-3,3e-3. The same
    call goes on where it was interrupted.
    """
    out_dir = Path(lists.pop("out_dir", ["out"])[0])
    overwrite = lists.pop("overwrite", [False])[0]
    runs = plan(lists)
    for o in {(o.data, o.tokenizer, o.block_size): o for o in map(resolve, runs.values())}.values():
        load_splits(prepare_data.prepare(o.data, o.tokenizer, quiet=True), o)  # refuse now, not after hours
    out_dir.mkdir(parents=True, exist_ok=True)
    with lock(out_dir):
        begun = out_dir / "compare.json"
        if begun.exists() and not overwrite and read_json(begun) != lists:
            raise UserError(f"{out_dir} holds another compare; give its options to go on with it, --overwrite to "
                            "replace it, or another --out_dir")
        if overwrite and begun.exists():
            for name in ("results.csv", "table.md", "compare.json"):
                (out_dir / name).unlink(missing_ok=True)
            shutil.rmtree(out_dir / "runs", ignore_errors=True)
        write_json(begun, lists)
        results_csv = out_dir / "results.csv"
        results = read_csv(results_csv, RESULT_COLUMNS, lambda column, text: RESULT_COLUMNS[column](text)) \
            if results_csv.is_file() else []
        done = {(row["variant"], row["learning_rate"], row["seed"]) for row in results}
        try:
            for i, (key, given) in enumerate(tqdm(runs.items(), desc="all runs", unit="run", disable=None), 1):
                if key in done:
                    continue
                description = f"{i}/{len(runs)} {key[0]}, lr {key[1]:g}, seed {key[2]}"
                results.append({"variant": key[0], **run_one(given, run_folder(out_dir, key), description)})
                write_csv(results_csv, RESULT_COLUMNS, results)
        except Stopped as e:
            raise Stopped("stopped and saved; the same command goes on from here", e.code - 128) from None
    ordered = sorted(results, key=lambda row: list(runs).index((row["variant"], row["learning_rate"], row["seed"])))
    summary = summarise(ordered)
    text = table(summary)
    write_atomically(out_dir / "table.md", lambda file: file.write(text.encode()))
    print(f"\n{text}")
    draw_compare(out_dir, summary, ordered)


def run_folder(out_dir, key):
    """Where a compare keeps the run (variant, learning_rate, seed)."""
    variant, rate, seed = key
    return out_dir / "runs" / f"{re.sub(r'[^A-Za-z0-9=.-]', '_', variant)}-lr{rate!r}-seed{seed}"


# ----------------------------------------------------------------------------------------------------------------------
# Looking inside

def probe_batch(run):
    """The first batch of an evaluation, (x, y), on the run's device: the same one for every run on the same data."""
    window = run.to_device(next(eval_batches(run.tokens["val"], run.o)))
    return window[:, :-1], window[:, 1:]


def probe(given):
    """
    Show what each sublayer does to the stream, by GPT.probe on one batch of validation data: of the last.pt in
    --out_dir, or, where model options are given, of a fresh model of that shape.
    """
    fresh = any(name in given for name in (*MODEL_OPTIONS, "size", "data", "tokenizer"))
    if fresh:
        run = start_run({**given, "eval_only": True})
        out_dir = Path(given.get("out_dir", f"out-probe-{run.o.norm_mode}"))
    else:
        run = start_run({**given, "resume": True})
        out_dir = Path(run.o.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rows = run.model.probe(*probe_batch(run))
    columns = list(rows[0])
    print(f"{run.o.norm_mode}, {'before training' if fresh else f'after {run.step} steps'}, {run.o.data}")
    print("".join(f"{column:>12}" for column in columns))
    for row in rows:
        print("".join(f"{value:>12}" if isinstance(value, str) else f"{value:>12.4g}" for value in row.values()))
    write_csv(out_dir / "probe.csv", columns, rows)
    plt = pyplot()
    if plt:
        when = "start" if fresh else "end"
        print("pictures:", *draw_depth(plt, out_dir, {when: {run.o.norm_mode: rows}}, prefix="probe-"))


# ----------------------------------------------------------------------------------------------------------------------
# Pictures

# One colour and dash per mode, the same in every picture: Okabe and Ito's palette, its yellow darkened, which
# colour-blind readers can tell apart; the modes beyond its eight colours differ in their dashes.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
STYLES = [(color, dash) for dash in ("-", "--", ":") for color in PALETTE]
DEPTH_PICTURES = {"rms": "RMS of the stream", "grad_norm": "gradient norm of the sublayer",
                  "angle": "angle turned (radians)"}


def style(name, names):
    """(colour, dash) of a curve: the mode's own where the curves are modes, else by position."""
    order = list(NORM_MODES) if all(n in NORM_MODES for n in names) else list(names)
    return STYLES[order.index(name) % len(STYLES)]


def pyplot():
    """matplotlib.pyplot, or None and one line that says how to get it."""
    try:
        import matplotlib
        matplotlib.use("Agg")  # draw into files: no window, no display needed
        from matplotlib import pyplot as plt
    except ImportError:
        print("no pictures: they need matplotlib (pip install matplotlib)")
        return None
    # an opaque white ground is readable on a light page and on a dark one
    plt.rcParams.update({"figure.facecolor": "white", "axes.grid": True, "grid.alpha": 0.3, "font.size": 10,
                         "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 120})
    return plt


def draw_compare(out_dir, summary, results):
    """The pictures of a compare, each variant at its best learning rate: loss curves and the pictures by depth."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    names = [row["variant"] for row in summary]
    depth = {"start": {}, "end": {}}
    for row in summary:
        runs = [run_folder(out_dir, (r["variant"], r["learning_rate"], r["seed"])) for r in results
                if (r["variant"], r["learning_rate"]) == (row["variant"], row["learning_rate"])]
        curves = [{line["step"]: line["val_loss"] for line in read_log(run / "log.csv") if line["val_loss"] is not None}
                  for run in runs]
        steps = sorted(set.intersection(*map(set, curves)))
        steps = steps[1:] if len(steps) > 2 else steps  # beside the loss at the start all that matters looks flat
        losses = np.array([[curve[step] for step in steps] for curve in curves])  # (runs, evaluations)
        color, dash = style(row["variant"], names)
        axes.plot(steps, losses.mean(0), dash, color=color, label=row["variant"])
        axes.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.2, linewidth=0)
        for when, probes in depth.items():
            files = [run / f"probe-{when}.json" for run in runs if (run / f"probe-{when}.json").is_file()]
            if files:
                probes[row["variant"]] = read_json(files[0])
    axes.set(xlabel="step", ylabel="validation loss (nats per token)", title="mean over seeds; band: lowest to highest")
    axes.legend()
    figure.savefig(out_dir / "loss.png")
    plt.close(figure)
    print("pictures:", out_dir / "loss.png", *draw_depth(plt, out_dir, depth))


def draw_depth(plt, out_dir, depth, prefix=""):
    """
    Draw rms, grad_norm and angle by sublayer; returns the paths. depth: {"start" or "end": {curve's name: rows of
    GPT.probe}}. A compare shows its first seed.
    """
    names = list(dict.fromkeys(name for probes in depth.values() for name in probes))
    widths = dict(zip(names, np.linspace(3.5, 1.2, len(names))))  # a later curve leaves the one below it in sight
    paths = []
    for key, label in DEPTH_PICTURES.items():
        figure, panels = plt.subplots(1, len(depth), figsize=(5.5 * len(depth), 4), layout="constrained", squeeze=False,
                                      sharey=key != "grad_norm")
        for axes, (when, probes) in zip(panels[0], depth.items(), strict=True):
            for name, rows in probes.items():
                color, dash = style(name, names)
                axes.plot(range(1, len(rows) + 1), [row[key] for row in rows], dash, color=color, marker=".",
                          linewidth=widths[name], label=name)
            # an untied head starts at zero, and so do the gradients below it: a log axis could not show them
            positive = all(row[key] > 0 for rows in probes.values() for row in rows)
            axes.set(xlabel="sublayer (attention, MLP, attention, ...)", ylabel=label, title=f"{when} of training",
                     yscale="log" if positive and key != "angle" else "linear")
            if axes.get_yscale() == "log":
                axes.yaxis.set_major_formatter("{x:g}")
                low, high = axes.get_ylim()  # over many decades there is no room for numbers in between
                axes.yaxis.set_minor_formatter("{x:g}" if high < 30 * low else "")
        if key == "rms":  # a stream of constant size is a flat line, not a magnified rounding error
            low, high = axes.get_ylim()  # of both panels: they share the axis
            axes.set_ylim(min(low, 0.8), max(high, 1.25))
        panels[0][0].legend()
        paths.append(out_dir / f"{prefix}{key}.png")
        figure.savefig(paths[-1])
        plt.close(figure)
    return paths


# ----------------------------------------------------------------------------------------------------------------------
# Speed

BENCH_COLUMNS = ("norm_mode", "compile", "ms_per_step", "tokens_per_s", "ratio", "peak_mb")
STEP_PARTS = ("data", "forward", "backward", "optimizer")
PARTS_COLUMNS = ("norm_mode", "compile", *STEP_PARTS, "gflop_per_s", "generate_tokens_per_s")


def bench_run(given):
    """A Run on random tokens, which cost as much as real ones: bench measures the step, not the data."""
    o = resolve({"max_iters": 0, **given})
    vocab_size = 50257 if o.size in ("125M", "350M", "1.3B") else 65
    noise = np.random.default_rng(o.seed).integers(vocab_size, size=10**6 + o.block_size).astype(np.uint16)
    model = GPT(model_config(o, vocab_size, vocab_multiple=64 if vocab_size > 65 else 1))
    run = Run(o, model.train(), None, {"train": prepare_data.TokenStream([noise])}, {})
    run.update()  # compiles, and makes the optimizer's state
    return run


def wait_for(device):
    """Return when the device has done all that it was given: a GPU runs behind the program."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def process_peak():
    """The most memory this process has held so far, in bytes; nan where the system does not tell."""
    try:  # Linux. (Its ru_maxrss would be that of the parent process, if that was larger.)
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    except OSError:
        try:
            import resource
        except ImportError:  # Windows
            return math.nan
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def peak_mb(given):
    """Peak memory of training in MB (10^6 bytes): what the GPU allocates, or by how much this fresh process grows."""
    device = pick_device(given.get("device", "auto"))
    if device.type == "cuda":
        bench_run(given).update()
        return torch.cuda.max_memory_allocated(device) / 1e6
    before = process_peak()
    bench_run(given).update()
    return (process_peak() - before) / 1e6


def timed(device, action):
    """Seconds that action() takes on the device."""
    began = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - began


def time_parts(run):
    """Seconds that each of STEP_PARTS takes in one update: [...]. Waits for the device after each."""
    seconds, last = dict.fromkeys(STEP_PARTS, 0.0), time.perf_counter()

    def done(part):
        nonlocal last
        wait_for(run.device)
        now = time.perf_counter()
        seconds[part] += now - last
        last = now
    run.update(done)
    return list(seconds.values())


def measure(runs, turns):
    """
    Time the runs side by side, one after the other in each turn. Returns per run (seconds per step, seconds per part of
    a step, seconds per generated token) as arrays (turns,), (turns, parts) and (a few).
    """
    steps, parts, tokens = ([[] for _ in runs] for _ in range(3))
    for turn in tqdm(range(turns), desc="turns", disable=None):
        for i, run in enumerate(runs):
            steps[i].append(timed(run.device, run.update))
            parts[i].append(time_parts(run))
            if turn < 3:  # an eager forward per token, with any --compile: three tell enough
                count = min(run.o.block_size, 200)
                start = torch.zeros(1, 1, dtype=torch.long, device=run.device)
                with run.autocast:
                    tokens[i].append(timed(run.device, lambda: run.model.generate(start, count)) / count)
    return [tuple(map(np.array, of_run)) for of_run in zip(steps, parts, tokens, strict=True)]


def profile_steps(run, path, steps=3):
    """Leave a trace of some updates at path, for chrome://tracing or Perfetto; print the ten dearest operations."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = run.device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]) as trace:
        for _ in range(steps):
            run.update()
        wait_for(run.device)
    trace.export_chrome_trace(str(path))

    def own_time(operation):  # microseconds, without the operations that it calls
        return operation.self_device_time_total if on_gpu else operation.self_cpu_time_total
    operations = sorted(trace.key_averages(), key=own_time, reverse=True)
    total = sum(map(own_time, operations)) or 1.0
    print(f"\n{run.o.norm_mode}{', compiled' if run.compiled else ''}: the ten dearest operations; all in {path}")
    for operation in operations[:10]:
        print(f"{own_time(operation) / total:>7.1%}{operation.count / steps:>8.0f} calls a step   {operation.key[:80]}")


def print_table(columns, rows):
    """Rows as dictionaries, a column each as wide as its longest cell."""
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    print("\n" + "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(line, widths)) for line in cells))


def bench(lists):
    """
    Time a training step of every norm_mode side by side: one step of each in turn, --max_iters times (default 30), so
    that a machine that slows down hurts all alike. The ratio is the median over the turns of the time against pre's (or
    the first mode's) in the same turn. A second table says where the step goes (shares), what it computes (6 N +
    attention FLOPs per token) and how fast one text is generated. Lists are welcome: --norm_mode pre,geo --compile
    False,True.
    """
    out_dir = Path(lists.pop("out_dir", ["out"])[0])
    turns = lists.pop("max_iters", [30])[0]
    profile = lists.pop("profile", [False])[0]
    plan_of = {"norm_mode": list(NORM_MODES), "compile": [None], **lists}
    if turns < 1:
        raise UserError("--max_iters 0 times nothing; give 1 or more")
    for name, values in plan_of.items():
        if len(values) > 1 and name not in ("norm_mode", "compile"):
            raise UserError(f"bench takes lists of norm_mode and compile alone; give one value of --{name}")
    # all modes at once are more models of one forward than torch.compile would keep the code of
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(NORM_MODES))
    planned = plan(plan_of).values()
    out_dir.mkdir(parents=True, exist_ok=True)
    runs, peaks = [], []
    for given in planned:
        # a fresh process, which has no peak of its own yet
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks.append(pool.submit(peak_mb, given).result())
        runs.append(bench_run(given))
    measured = measure(runs, turns)
    report = []
    for run, peak, (steps, parts, tokens) in zip(runs, peaks, measured, strict=True):
        same = [i for i, other in enumerate(runs) if other.compiled == run.compiled]
        base = next((i for i in same if runs[i].o.norm_mode == "pre"), same[0])
        ms = 1e3 * float(np.median(steps))
        rate = run.tokens_per_step / ms * 1e3
        shares = np.median(parts, axis=0) / np.median(parts, axis=0).sum()
        report.append({"norm_mode": run.o.norm_mode, "compile": run.compiled, "ms_per_step": f"{ms:.3f}",
                       "tokens_per_s": f"{rate:.0f}", "ratio": f"{np.median(steps / measured[base][0]):.3f}",
                       "peak_mb": f"{peak:.1f}",
                       **{part: f"{share:.3f}" for part, share in zip(STEP_PARTS, shares, strict=True)},
                       "gflop_per_s": f"{run.model.flops_per_token() * rate / 1e9:.1f}",
                       "generate_tokens_per_s": f"{1 / np.median(tokens):.0f}"})
    for name, columns in (("bench.csv", BENCH_COLUMNS), ("bench_parts.csv", PARTS_COLUMNS)):
        print_table(columns, report)
        write_csv(out_dir / name, columns, report)
    if profile:
        for run in runs:
            profile_steps(run, out_dir / f"trace-{run.o.norm_mode}{'-compiled' if run.compiled else ''}.json")


COMMANDS = {"train": train, "sample": sample, "compare": compare, "probe": probe, "bench": bench}


def main(argv=None):
    """Run one command line; returns the exit code. Whatever the user can mend ends in one line on stderr."""
    prepare_data.escape_unprintable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, raise_stopped)
    try:
        command, given = parse_args(sys.argv[1:] if argv is None else argv)
        COMMANDS[command](given)
        return 0
    except UserError as e:
        message, code = str(e), e.code
    except KeyboardInterrupt as e:
        message, code = str(e) or "stopped", getattr(e, "code", 130)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        error = file_error(e, e.filename or "a file")
        message, code = str(error), error.code
    except (MemoryError, RuntimeError) as e:  # torch says "can't allocate memory" on a CPU, "out of memory" on a GPU
        if isinstance(e, MemoryError) or re.search("out of memory|can't allocate memory", str(e)):
            message, code = "out of memory; lower --batch_size, --block_size or the model's size", 1
        elif type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
            message, code = f"torch.compile failed ({str(e).splitlines()[0][:150]}); use --compile False", 1
        else:
            raise
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
