"""
Text -> tokens on disk. train.py calls this by itself; run it alone to prepare ahead, or with other options.

    python prepare_data.py                                   python: the standard library of the Python that runs this
    python prepare_data.py shakespeare                       tiny Shakespeare, 1 MB of download
    python prepare_data.py mybook.txt                        your own text, character by character
    python prepare_data.py my/folder --tokenizer byte        a folder of .txt, .md, .py and .jsonl files, each also .gz
    python prepare_data.py mybook.txt --tokenizer gpt2 --out tokens/mybook
    python prepare_data.py fineweb --shards 10               a billion tokens, ready made
    python prepare_data.py --help                            all data sets with size and licence

The result is a folder, data/NAME-TOKENIZER beside this file unless --out names another:

    train.bin, val.bin    token ids, little-endian uint16, or uint32 where the vocabulary needs it, and nothing else
    meta.json             the tokenizer, vocabulary size, token counts, and the sha256 of the source

Validation is the last tenth of the characters. Of 20 documents or more (files of a folder, lines of a .jsonl file) it
is a tenth of them: document number i, from 0 and not counting empty ones, where crc32 of the decimal digits of i is a
multiple of 10. Where there is more than one document, each ends in a blank line (char, byte) or the end-of-text token
(BPE); a single text is kept exactly as it is. A folder is built beside its place and renamed when it is whole.
Downloads are kept in data/downloads for another tokenizer; once the tokens are there they may be deleted.
"""
import argparse
import codecs
import difflib
import errno
import gzip
import hashlib
import http.client
import io
import json
import os
import platform
import re
import shutil
import signal
import socket
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tqdm import tqdm


@dataclass(frozen=True)
class Dataset:
    """One row of the table below. known: file name -> (bytes, sha256), for downloads whose content is fixed."""
    about: str
    disk: str  # what download and tokens take together
    licence: str
    tokenizer: str  # what "auto" stands for
    url: str = ""
    known: dict = field(default_factory=dict)


# Every address this program knows. They will change one day: this is the place to mend them.
DATASETS = {
    "python": Dataset("the .py files of the running Python's standard library", "20 MB", "PSF License", "char"),
    "shakespeare": Dataset(
        "tiny Shakespeare, nanoGPT's first data set", "3 MB", "public domain", "char",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        {"input.txt": (1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")}),
    "fineweb": Dataset(
        "FineWeb, in GPT-2 tokens: --shards 1 to 103, 100 million tokens each", "200 MB + 200 MB a shard",
        "ODC-By 1.0", "gpt2",
        "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c/",
        {"fineweb_val_000000.bin":
            (200_001_024, "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640"),
         "fineweb_train_000001.bin":
            (200_001_024, "771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e")}),
    "arxiv": Dataset(
        "papers from arXiv: RedPajama's sample", "160 MB", "each paper's own, see source", "gpt2",
        "https://huggingface.co/datasets/togethercomputer/RedPajama-Data-1T-Sample/resolve/main/arxiv_sample.jsonl"),
    "books": Dataset(
        "PG-19, books from before 1919: --limit MB of them", "1.6 times --limit", "public domain in the US", "gpt2",
        "https://storage.googleapis.com/deepmind-gutenberg/train/"),
}
BOOK_LIST = "https://huggingface.co/datasets/deepmind/pg19/resolve/main/data/train_files.txt"
FINEWEB_SHARDS = 103
DATA_ROOT = Path(__file__).resolve().parent / "data"
ENDINGS = (".txt", ".md", ".py", ".jsonl")  # each also with .gz behind it
MANY = 20  # from so many documents on, validation is a tenth of them and no longer the end of the text
FORMAT = 1  # goes up when the same source would give other tokens, so that old folders are made anew
GPT2_META = {"tokenizer": {"name": "gpt2", "vocab_size": 50257}, "vocab_size": 50257, "dtype": "uint16"}
SHARD_MAGIC, SHARD_HEADER_BYTES = 20240520, 1024  # a shard starts with 256 int32: magic, version 1, token count, zeros


SPLITS = ("train", "val")


class UserError(Exception):
    """The user's input cannot be used: one line that names the value and the remedy. Commands print it on stderr and
    exit with `code`: 2, or 1 for a run that failed (a full disk, a broken download)."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


class UnknownData(UserError):
    """Neither the name of a data set nor a path at which there is anything."""


def closest(word, choices):
    """A hint for a misspelt word: "; did you mean 'char'?", or "" where nothing is close."""
    found = difflib.get_close_matches(str(word).lower(), list(choices), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

class Tokenizer:
    """
    Text <-> token ids. name: str; vocab_size: int, ids are 0 .. vocab_size - 1.

    encode(text) -> 1-D integer array; decode(ids) -> str; spec() -> plain JSON data from which tokenizer_from_spec
    makes the same tokenizer again: it travels in every checkpoint. decode(encode(text)) is the text.
    """
    end_of_text = None  # id that ends a document, where the vocabulary has one

    @property
    def dtype(self):
        """Name of the type that holds an id on disk."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode_many(self, texts):
        """List of strings -> list of id sequences."""
        return [self.encode(text) for text in texts]


class CharTokenizer(Tokenizer):
    """One id per character of an alphabet."""
    name = "char"

    def __init__(self, alphabet):
        """alphabet: str of distinct characters; the id of a character is its place there."""
        self.alphabet, self.vocab_size = alphabet, len(alphabet)
        self.codes = np.frombuffer(alphabet.encode("utf-32-le"), "<u4")  # (vocab_size,) code points
        # Code point -> id, -1 for strangers; the last row is one too, for every code point beyond the table.
        self.ids = np.full(int(self.codes.max()) + 2, -1, np.int32)
        self.ids[self.codes] = np.arange(self.vocab_size)

    def encode(self, text):
        """UserError names the first character that is not in the alphabet."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        if len(ids) and ids.min() < 0:
            raise UserError(f"the text holds {name_char(text[int(np.argmax(ids < 0))])}, which is none of the "
                            f"{self.vocab_size} characters of this tokenizer; leave it out, or train with --tokenizer "
                            "byte")
        return ids

    def decode(self, ids):
        return self.codes[np.asarray(ids, dtype=np.int64)].tobytes().decode("utf-32-le")

    def spec(self):
        return {"name": "char", "alphabet": self.alphabet}


class ByteTokenizer(Tokenizer):
    """One id per byte of the UTF-8 text."""
    name, vocab_size = "byte", 256

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)

    def decode(self, ids):
        """Bytes that are no UTF-8 (a sample may end inside a character) become U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode("utf-8", "replace")

    def spec(self):
        return {"name": "byte"}


class BPETokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken. Its tables are loaded when first needed: training on tokens needs none."""

    def __init__(self, name, vocab_size=None):
        names = import_tiktoken(name).list_encoding_names()
        if name not in names:
            choices = ["char", "byte", *names]
            raise UserError(f"no tokenizer {name!r}{closest(name, choices)}; there are {', '.join(choices)}")
        self.name = name
        if vocab_size is not None:
            self.vocab_size = vocab_size

    @cached_property
    def vocab_size(self):
        return self.encoding.n_vocab

    @property
    def end_of_text(self):
        return self.encoding.eot_token

    @cached_property
    def encoding(self):
        """tiktoken.Encoding; UserError where its tables are neither cached nor to be had."""
        try:
            return import_tiktoken(self.name).get_encoding(self.name)
        except Exception as e:  # requests, ssl and tiktoken each raise their own
            files = "vocab.bpe and encoder.json" if self.name == "gpt2" else f"{self.name}.tiktoken"
            cache = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
            raise UserError(
                f"the tables of tokenizer {self.name} ({files}) are not on this machine and could not be downloaded "
                f"({type(e).__name__}); go online once, or let TIKTOKEN_CACHE_DIR (now {cache}) name a folder with "
                "tiktoken's cache from another machine, or take --tokenizer byte", code=1) from None

    def encode(self, text):
        return np.concatenate([np.zeros(0, self.dtype), *self.encode_many(recut([text]))])

    @cached_property
    def threads(self):
        return ThreadPoolExecutor(os.cpu_count())  # threads suffice: tiktoken's work is done outside Python

    def encode_many(self, texts):
        # tiktoken's encode_ordinary_batch, but with threads that stay and make arrays at once: lists take 20 times as
        # much. "ordinary": <|endoftext|> inside a text is text, and never the token that ends a document.
        return list(self.threads.map(lambda text: np.array(self.encoding.encode_ordinary(text), self.dtype), texts))

    def decode(self, ids):
        """Bytes that are no UTF-8 become U+FFFD, and so do ids that the vocabulary skips (cl100k_base skips some)."""
        return b"".join(map(self.bytes_of, np.asarray(ids, dtype=np.int64).tolist())).decode("utf-8", "replace")

    def bytes_of(self, token_id):
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return "\ufffd".encode()

    def spec(self):
        return {"name": self.name, "vocab_size": self.vocab_size}


def import_tiktoken(name):
    """The module tiktoken, imported only here: char and byte do without it."""
    try:
        import tiktoken
        return tiktoken
    except ImportError:
        raise UserError(f"tokenizer {name!r} is tiktoken's: pip install tiktoken, or take char or byte") from None


def name_char(char):
    """'é' (U+00E9)"""
    return f"{char!r} (U+{ord(char):04X})"


def tokenizer_from_spec(spec):
    """The Tokenizer that spec() described; UserError where it describes none."""
    match spec:
        case {"name": "char", "alphabet": str(alphabet)} if alphabet and len(set(alphabet)) == len(alphabet):
            return CharTokenizer(alphabet)
        case {"name": "byte"}:
            return ByteTokenizer()
        case {"name": str(name), "vocab_size": int(size)} if name != "char" and size > 0:
            return BPETokenizer(name, size)
    raise UserError(f"{str(spec)[:80]!r} describes no tokenizer; the file it comes from is damaged")


# ----------------------------------------------------------------------------------------------------------------------
# Reading texts

class CountedFile(io.FileIO):
    """A file that moves a tqdm bar by the bytes read from it (for .gz: the compressed ones, whose total is known)."""
    bar = None

    def readinto(self, buffer):
        count = super().readinto(buffer)
        if self.bar is not None:
            self.bar.update(count)
        return count


@contextmanager
def opened(path, bar=None):
    """A text file's bytes, unpacked where its name ends in .gz; UserError where that fails."""
    with CountedFile(path) as raw:
        raw.bar = bar
        file = io.BufferedReader(raw, 1 << 20)
        try:
            yield gzip.open(file) if path.name.lower().endswith(".gz") else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise UserError(f"{path} is no whole .gz file ({e}); copy or download it again") from None


def read_chunks(path, bar=None):
    """Yield a UTF-8 file as strings of about a megabyte, as they stand: a BOM, CRLF and NUL stay. Flat memory."""
    decoder, count = codecs.getincrementaldecoder("utf-8")(), 0
    with opened(path, bar) as file:
        while True:
            raw = file.read(1 << 20)
            count += len(raw)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:  # e.object: these bytes, and before them what was left of a cut character
                raise not_utf8(path, count - len(e.object) + e.start, e) from None
            if text:
                yield text
            if not raw:
                return


def not_utf8(path, offset, e):
    hint = "save it as UTF-8"
    if offset == 0 and e.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = "it looks like UTF-16: " + hint
    return UserError(f"{path} is not UTF-8: byte {e.object[e.start]:#04x} at offset {offset}; {hint}")


def read_text(path):
    """The whole text of a file; UserError where there is none or it is not UTF-8."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return "".join(read_chunks(path))


def read_jsonl(path, bar=None):
    """Yield the field `text` of every line; UserError names the line that has none."""
    offset = 0
    with opened(path, bar) as file:
        for number, line in enumerate(file, start=1):
            try:
                line_text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                text = json.loads(line_text)["text"] if line.strip() else ""
                text.encode()  # a lone surrogate, "\ud800", passes as JSON, but no text has one
            except UnicodeDecodeError as e:
                raise not_utf8(path, offset + e.start, e) from None
            except UnicodeEncodeError as e:
                raise UserError(f"{path} line {number}: {name_char(e.object[e.start])} is half a character; mend or "
                                "drop the line") from None
            except (ValueError, RecursionError) as e:
                raise UserError(f"{path} line {number} is not JSON ({e}); mend or drop the line") from None
            except (TypeError, KeyError, AttributeError):
                raise UserError(f"{path} line {number} is no object with a string \"text\"; mend or drop the "
                                "line") from None
            offset += len(line)
            yield text


def has_ending(path):
    return path.name.lower().removesuffix(".gz").endswith(ENDINGS)


@dataclass
class Source:
    """Texts to be tokenised. options: whatever else than the files decides what comes out; part of meta.json."""
    name: str  # as messages name it
    label: str  # the folder's name begins so
    options: dict
    list_files: Callable  # () -> list of Paths in reading order; downloads what is missing
    fixed: bool = False  # comes from an address in the table: what was prepared needs no second look

    @cached_property
    def files(self):
        files = self.list_files()
        if not files:
            raise UserError(f"the data set {self.name} has no files here; take another one")
        return files

    def documents(self, bar=None):
        """Yield every document that is not empty, as an iterable of strings."""
        for path in self.files:
            if path.name.lower().removesuffix(".gz").endswith(".jsonl"):
                yield from ([text] for text in read_jsonl(path, bar) if text)
            else:
                chunks = read_chunks(path, bar)
                if first := next(chunks, ""):
                    yield chain([first], chunks)

    def size(self):
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def stat(self):
        """A cheap mark that changes whenever a file was written to (ctime cannot be set back)."""
        stats = [(str(path), path.stat()) for path in self.files]
        return sha256_of_bytes(repr([(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]).encode())

    def sha256(self):
        """Of one file its sha256; of many that of the lines "sha256 name"."""
        sums = [(sha256_of(path), path.name) for path in self.files]
        if len(sums) == 1:
            return sums[0][0]
        return sha256_of_bytes(os.fsencode("".join(f"{digest} {name}\n" for digest, name in sums)))


def sha256_of_bytes(data):
    return hashlib.sha256(data).hexdigest()


def sha256_of(path):
    """Hex digest of a file, in flat memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Where texts come from

def find_source(data, limit, downloads):
    """The Source that a name or a path stands for. Downloads nothing yet. UserError for what is neither."""
    if data == "python":
        return Source(data, data, {"python": platform.python_version()}, python_files)
    if data == "books":
        return Source(data, data, {"limit": limit}, lambda: book_files(limit, downloads), fixed=True)
    if data in DATASETS:
        return Source(data, data, {}, lambda: [download_known(data, "", downloads)], fixed=True)
    path = Path(data).expanduser().resolve()
    stem = re.sub(r"[^\w.-]+", "_", path.name.split(".")[0], flags=re.ASCII)[:40]
    label = f"{stem}-{sha256_of_bytes(os.fsencode(path))[:8]}"  # two books of one name are two data sets
    return Source(str(data), label, {}, lambda: path_files(path, data))


def python_files():
    """The standard library without its tests, and without the few files that are not pure ASCII: an alphabet of 100."""
    left_out = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted((path.relative_to(library).as_posix(), path) for path in library.rglob("*.py"))
    return [path for name, path in paths if not left_out & set(name.split("/")) and path.read_bytes().isascii()]


def path_files(path, data):
    """[path], or the usable files of a folder by name; UserError where there is none."""
    endings = f"{', '.join(ENDINGS)}, each also .gz"
    if path.is_file():
        if not has_ending(path):
            raise UserError(f"{path} does not end in {endings}; rename it if it is text, or name its folder if it "
                            "holds tokens")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give a file with text")
        return [path]
    if not data or not path.is_dir():
        raise UnknownData(f"there is no data set or file {data!r}{closest(data, DATASETS)}; give the path of a text or "
                          f"one of {', '.join(DATASETS)}")
    found = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if has_ending(file))
    files = [file for name, file in found if file.is_file() and not name.startswith(".") and "/." not in name]
    if not files:
        raise UserError(f"the folder {path} holds no file that ends in {endings}")
    return files


def book_files(limit, downloads):
    """The first books of PG-19's list that make `limit` MB together, as downloaded files."""
    listing = read_text(download(BOOK_LIST, downloads / "books" / "train_files.txt"))
    files = []
    with tqdm(total=limit * 10**6, unit="B", unit_scale=True, desc="books", disable=None) as bar:
        for number in re.findall(r"(\d+)(?:\.txt)?$", listing, flags=re.MULTILINE):
            files.append(download_known("books", f"{number}.txt", downloads / "books"))
            bar.update(files[-1].stat().st_size)
            if bar.n >= limit * 10**6:
                break
    return files


# ----------------------------------------------------------------------------------------------------------------------
# Downloads

TIMEOUT = 30.0  # seconds without a byte
RETRIES = 8
BACKOFF = 1.0  # seconds before the first retry, doubled for each further one up to a minute


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the sha256 that Hugging Face states on the way there."""
    sha256 = None

    def redirect_request(self, request, file, code, message, headers, url):
        self.sha256 = stated_sha256(headers) or self.sha256
        return super().redirect_request(request, file, code, message, headers, url)


def stated_sha256(headers):
    found = re.search(r"\b[0-9a-f]{64}\b", headers.get("X-Linked-ETag", ""))
    return found and found[0]


def download_known(dataset, name, folder):
    """Download a file of DATASETS[dataset] into folder, checked where the table knows it; returns its path."""
    url = DATASETS[dataset].url + name
    name = url.rsplit("/", 1)[-1]
    return download(url, folder / (name if name != "input.txt" else "tinyshakespeare.txt"),
                    *DATASETS[dataset].known.get(name, (None, None)))


def download(url, path, size=None, sha256=None):
    """
    Download url to path, unless it is there, and return path. What arrived is kept in path + ".part", and the next try
    goes on from there, in this call or a later one. size: bytes, sha256: hex digest, where known; a sha256 that the
    server states counts too. Raises UserError (code 1) when the server refuses or RETRIES have been in vain.
    """
    part = path.with_name(path.name + ".part")
    with locked(path):
        if path.exists() and size in (None, path.stat().st_size) and sha256 in (None, sha256_of(path)):
            return path
        reason, remedy = "", "run the same command again to go on where it stopped"
        for attempt in range(RETRIES + 1):
            if attempt:
                wait = min(BACKOFF * 2 ** (attempt - 1), 60)
                print(f"{url}: {reason}; try {attempt} of {RETRIES} more in {wait:.0f} s", file=sys.stderr)
                time.sleep(wait)
            try:
                stated = fetch(url, part, size)
            except urllib.error.HTTPError as e:
                reason = f"the server answers {e.code} {e.reason}"
                if e.code < 500 and e.code not in (408, 429):
                    remedy = "if it has moved, put its new address into the table at the top of prepare_data.py"
                    break
            except (OSError, http.client.HTTPException) as e:  # cut, stalled, unreachable
                if getattr(e, "errno", None) in DISK_ERRORS:
                    raise
                cause = getattr(e, "reason", e)
                reason = str(cause) or type(e).__name__
                if isinstance(cause, socket.gaierror) and attempt >= 2:  # no such name: most likely there is no network
                    remedy = "is there a network? With one, run the same command again"
                    break
            else:
                found, expected = sha256_of(part), sha256 or stated
                if expected in (None, found):
                    os.replace(part, path)
                    return path
                part.unlink()
                if "sha256" in reason:  # twice a wrong file: a third time would not help
                    remedy = "it has changed, or something on the way changes it; see the table in prepare_data.py"
                    break
                reason = f"its sha256 is {found}, not {expected}"
        raise UserError(f"{url} cannot be downloaded: {reason}; {remedy}", code=1)


def fetch(url, part, size):
    """One try: append to `part` what it lacks. Returns the sha256 the server states, or None; OSError if it is cut."""
    offset = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "geogpt", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    redirects = Redirects()
    opener = urllib.request.build_opener(redirects)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        if e.headers.get("Content-Range") == f"bytes */{offset}" and size in (None, offset):
            return redirects.sha256  # the part is the whole file: an earlier run ended just before it could say so
        part.unlink(missing_ok=True)
        raise OSError("the server does not go on from where we are") from None
    with response:
        total = response.length  # of this answer
        found = re.match(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if response.status == 206 and found and int(found[1]) == offset:
            total = int(found[2])
        elif offset and response.status == 206:
            part.unlink()
            raise OSError("the server goes on from another place than asked")
        else:
            offset = 0  # it sends the whole file
        if total is None and not response.chunked:
            raise OSError("the server does not say how long the file is")
        bar = tqdm(total=size or total, initial=offset, unit="B", unit_scale=True, desc=part.stem, leave=False,
                   disable=None)
        with open(part, "ab" if offset else "wb") as file, bar:
            while data := response.read1(1 << 16):
                file.write(data)
                bar.update(len(data))
    count, wanted = part.stat().st_size, size or total
    if wanted is not None and count != wanted:
        raise OSError(f"{count:,} of {wanted:,} bytes came")
    return redirects.sha256 or stated_sha256(response.headers)


# ----------------------------------------------------------------------------------------------------------------------
# From texts to tokens

PIECE = 1 << 16  # characters; a piece has at most twice as many
BATCH = 1 << 19  # characters that are tokenised together: enough for every core, and 20 MB of tokens at the worst
# Places where no tokenizer of tiktoken joins two characters: before a blank that follows none, and between a letter or
# digit and white space or common punctuation. Cut there, the pieces have exactly the tokens of the whole.
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=[\s,.;:!?()。，、])")


def recut(chunks):
    """
    Re-cut a stream of strings into pieces of bounded length, at safe places wherever there is one. tiktoken panics on
    a million blanks, and a line without end would fill the memory: those are cut anyhow, and decode to the same text.
    """
    text = ""
    for chunk in chunks:
        text, start = text + chunk, 0
        while len(text) - start > 2 * PIECE:
            found = SAFE_CUT.search(text, start + PIECE, start + 2 * PIECE)
            end = found.end() if found else start + 2 * PIECE
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def survey(documents, alphabet_wanted):
    """(number of documents, number of characters, set of all characters). Unless the alphabet is wanted it stops at
    MANY documents, since from there on nobody asks for the numbers."""
    count, length, alphabet = 0, 0, set()
    for document in documents:
        for chunk in document:
            length += len(chunk)
            if alphabet_wanted:
                alphabet.update(chunk)
        count += 1
        if count == MANY and not alphabet_wanted:
            break
    return count, length, alphabet


def split_pieces(documents, cut, separate, bpe):
    """
    Yield (split, piece of text), split being "train" or "val". cut: number of characters that go to train, or None to
    deal out whole documents. If `separate`, a blank line follows each document, or (split, None) for bpe.
    """
    seen = 0
    for index, document in enumerate(documents):
        split = "val" if zlib.crc32(b"%d" % index) % 10 == 0 else "train"
        for piece in recut(document):
            if cut is None:
                yield split, piece
                continue
            head, tail = piece[:max(cut - seen, 0)], piece[max(cut - seen, 0):]
            seen += len(piece)
            split = "val" if tail else "train"
            if head:
                yield "train", head
            if tail:
                yield "val", tail
        if separate:
            yield split, None if bpe else "\n" if piece.endswith("\n") else "\n\n"


def batches(pieces):
    """Group (split, piece) into lists of about BATCH characters."""
    batch, length = [], 0
    for split, piece in pieces:
        batch.append((split, piece))
        length += len(piece or "") + 64  # a short piece takes more memory than its characters
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    yield batch


def write_tokens(pieces, tokenizer, folder):
    """Write train.bin and val.bin; returns {"train": tokens, "val": tokens}."""
    counts = {"train": 0, "val": 0}
    dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for batch in batches(pieces):
            encoded = iter(tokenizer.encode_many([piece for _, piece in batch if piece is not None]))
            for split, piece in batch:
                ids = [tokenizer.end_of_text] if piece is None else next(encoded)
                files[split].write(np.asarray(ids, dtype).tobytes())
                counts[split] += len(ids)
    return counts


def build(source, tokenizer, folder):
    """Tokenise a source into an empty folder: train.bin, val.bin and, last, meta.json."""
    if tokenizer != "char":
        tokenizer.encode("")  # a missing BPE table is told before a long download, not after
    origin = source.options | {"files": len(source.files), "bytes": source.size(), "stat": source.stat(),
                               "sha256": source.sha256()}
    # Few documents are one text, cut by characters, so these are counted first. That reads twice, in flat memory.
    chars = tokenizer == "char" or isinstance(tokenizer, CharTokenizer)
    count, length, alphabet = survey(source.documents(), alphabet_wanted=chars)
    if count == 0:
        raise UserError(f"{source.name} holds no text: every file is empty")
    separate = count > 1
    if chars and separate:
        alphabet.add("\n")
    if tokenizer == "char":
        tokenizer = CharTokenizer("".join(sorted(alphabet)))
    elif chars and (unknown := sorted(alphabet - set(tokenizer.alphabet))):
        shown = ", ".join(map(name_char, unknown[:10])) + (", ..." if len(unknown) > 10 else "")
        raise UserError(f"{source.name} holds {len(unknown)} characters that are not among the {tokenizer.vocab_size} "
                        f"of this tokenizer: {shown}; replace them")
    with tqdm(total=source.size(), unit="B", unit_scale=True, desc=source.name[-40:], disable=None) as bar:
        cut = length * 9 // 10 if count < MANY else None
        bpe = isinstance(tokenizer, BPETokenizer)
        counts = write_tokens(split_pieces(source.documents(bar), cut, separate, bpe), tokenizer, folder)
    write_meta(folder, {"tokenizer": tokenizer.spec(), "vocab_size": tokenizer.vocab_size, "dtype": tokenizer.dtype,
                        "train": {"train.bin": counts["train"]}, "val": {"val.bin": counts["val"]}, "source": origin})


def write_meta(folder, meta):
    """Write meta.json so that it is either the old one or the new one at any moment."""
    temporary = folder / ".meta.json"
    temporary.write_text(json.dumps(meta, indent=1), encoding="ascii")
    os.replace(temporary, folder / "meta.json")


# ----------------------------------------------------------------------------------------------------------------------
# Preparing: which folder, whether it is still good, one process at a time

DISK_ERRORS = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EIO)


@contextmanager
def locked(target):
    """Only one process at a time works on the path `target`; others wait. The system lifts the lock of a killed one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: two processes that prepare the same data at once are on their own
        yield
        return
    path = target.with_name(f".{target.name}.lock")
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"another process is preparing {target}; waiting for it", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever was before us has removed the lock file, and a lock on a file without a name locks nobody out.
            if same_file(path, file):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def same_file(path, file):
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def prepare(data="python", tokenizer="auto", out_dir=None, shards=None, limit=None, root=None, quiet=False):
    """
    Tokenise a data set unless that is done already; returns the folder (Path) with its token files and meta.json.

    data: a name in DATASETS, the path of a text file or a folder of them, or of a folder that holds token files.
    tokenizer: "auto", "char", "byte", a tiktoken name, or a Tokenizer, whose vocabulary is kept (for fine-tuning).
    out_dir: the result's folder, else one below root (data/ beside this file). shards of fineweb, limit in MB of books:
    as many as are there, else 1 and 100. quiet: not a word where nothing is to be done. UserError for whatever the user
    can mend; nothing half-written is left.
    """
    data, root = str(data), Path(root or DATA_ROOT)
    try:
        check_options(data, out_dir, shards, limit)
        path = Path(data).expanduser()
        if data and data not in DATASETS and is_token_folder(path):
            if out_dir:
                raise UserError(f"{data} holds tokens already, which are used where they are; leave --out out")
            return check_tokenizer(path, tokenizer)
        tokenizer, label = choose_tokenizer(data, tokenizer)
        if data == "fineweb":
            folder = Path(out_dir or root / "fineweb-gpt2")
            return prepare_fineweb(tokenizer, folder, shards or prepared_with("shards", folder) or 1, quiet)
        limit = limit or prepared_with("limit", Path(out_dir or root / f"{data}-{label}")) or 100
        source = find_source(data, limit, root / "downloads")
        source.options = {"format": FORMAT, "name": source.label, "tokenizer": label} | source.options
        return prepare_source(source, tokenizer, Path(out_dir or root / f"{source.label}-{label}"), quiet)
    except OSError as e:
        where = e.filename or out_dir or root
        if e.errno in DISK_ERRORS:
            raise UserError(f"{e.strerror}: {where}; free some space and run the same command again", code=1) from None
        raise UserError(f"{e.strerror or e}: {where}") from None


def check_options(data, out_dir, shards, limit):
    """UserError for an option that this data set does not have, or a value it cannot have."""
    for path in (data, str(out_dir or "")):
        if not is_path(path):
            raise UserError(f"{path!r} cannot be a path on this system; leave out what stands there as an escape")
    owners = ("shards", shards, "fineweb", FINEWEB_SHARDS), ("limit", limit, "books", 11_000)
    for name, value, owner, most in owners:
        if value is not None and data != owner:
            raise UserError(f"--{name} {value} belongs to the data set {owner}, not to {data!r}; leave it out")
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{name} {value} is out of range; {owner} has 1 to {most}")


def prepared_with(option, folder):
    """The value of an option that a folder was prepared with, or None: who does not name it means what is there."""
    try:
        return read_meta(folder)["source"].get(option)
    except UserError:
        return None


def is_path(text):
    """Whether the system can name a file so; under LC_ALL=C Python may have no bytes for some characters."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def choose_tokenizer(data, tokenizer):
    """(tokenizer, its part of the folder's name). The tokenizer stays "char" where the alphabet is yet to be found."""
    if isinstance(tokenizer, CharTokenizer):  # an alphabet from elsewhere: its folder must not pass for the text's own
        return tokenizer, f"char-{sha256_of_bytes(tokenizer.alphabet.encode())[:8]}"
    if isinstance(tokenizer, Tokenizer):
        return tokenizer, tokenizer.name
    if tokenizer == "auto":
        tokenizer = DATASETS[data].tokenizer if data in DATASETS else "char"
    if tokenizer == "char":
        return tokenizer, tokenizer
    return ByteTokenizer() if tokenizer == "byte" else BPETokenizer(tokenizer), tokenizer


def check_tokenizer(folder, tokenizer):
    """Path of a folder of ready token files, left as it is; UserError if they are not of the tokenizer asked for."""
    theirs = read_meta(folder)["tokenizer"]
    if tokenizer != "auto" and theirs["name"] != getattr(tokenizer, "name", tokenizer):
        raise UserError(f"the tokens in {folder} are not of the tokenizer {getattr(tokenizer, 'name', tokenizer)}, but "
                        f"of {theirs['name']}; prepare their text anew")
    if isinstance(tokenizer, CharTokenizer) and theirs != tokenizer.spec():
        raise UserError(f"the tokens in {folder} are of another alphabet; prepare their text anew")
    return folder


def stale(folder, source):
    """None if the folder holds just what is asked for, whole; else why not, "" standing for an empty place."""
    if not (folder / "meta.json").exists():
        return ""
    try:
        meta = read_meta(folder)
        for split in SPLITS:
            open_splits(folder, meta, split)
    except UserError as e:
        return f"is damaged ({e})"
    origin = meta["source"]
    if any(origin.get(name) != value for name, value in source.options.items()):
        return "was prepared from another source or with other options"
    if source.fixed:
        return None
    try:
        stat = source.stat()
    except UnknownData:
        print(f"{source.name} is gone; using the tokens that were made of it", flush=True)
        return None
    if origin.get("stat") != stat and origin.get("sha256") != source.sha256():
        return f"was prepared from an earlier state of {source.name}"
    return None


def check_place(folder):
    """UserError if replacing this folder would lose anything that is not ours."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out the name of a folder")
    held = {path.name for path in folder.glob("[!.]*")} if folder.exists() else set()
    if held and ("meta.json" not in held or held - {"meta.json", "train.bin", "val.bin"}):
        raise UserError(f"{folder} holds other files; give --out a new or an empty folder")


def prepare_source(source, tokenizer, folder, quiet):
    """prepare() for whatever has to be tokenised."""
    folder = Path(os.path.abspath(folder))
    if stale(folder, source) is not None:
        check_place(folder)
        if not source.fixed:
            source.size()  # a wrong path is told before anything is made
        with locked(folder):
            reason = stale(folder, source)  # another process may have done the work meanwhile
            if reason is not None:
                if reason:
                    print(f"{folder} {reason}; preparing it again", flush=True)
                replace_folder(folder, lambda temporary: build(source, tokenizer, temporary))
                return tell(folder)
    if not quiet:
        print(f"{folder} is ready: nothing to do", flush=True)
    return folder


def replace_folder(folder, fill):
    """Have `fill` fill an empty folder, then put that in the place of `folder`. Only whole folders ever stand there."""
    temporary, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    for leftover in (temporary, old):  # of a run that was killed: under the lock nobody else can be at work on them
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def prepare_fineweb(tokenizer, folder, shards, quiet):
    """prepare() for shards that are tokens already: they are downloaded and used as they are."""
    if getattr(tokenizer, "name", tokenizer) != "gpt2":
        raise UserError("fineweb comes in GPT-2 tokens; leave --tokenizer out, or give gpt2")
    folder = Path(os.path.abspath(folder))
    files = {"val": ["fineweb_val_000000.bin"], "train": [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]}
    origin = {"format": FORMAT, "name": "fineweb", "shards": shards}
    try:
        if (folder / "meta.json").exists():
            meta = read_meta(folder)
            if meta["source"] == origin and all(open_splits(folder, meta, split) for split in SPLITS):
                if not quiet:
                    print(f"{folder} is ready: nothing to do", flush=True)
                return folder
    except UserError as e:
        print(f"{e}; downloading what is missing", flush=True)
    with locked(folder):
        folder.mkdir(exist_ok=True)
        meta = GPT2_META | {"source": origin}
        for split in SPLITS:
            meta[split] = {name: fineweb_shard(folder, name) for name in files[split]}
        write_meta(folder, meta)
    return tell(folder)


def fineweb_shard(folder, name):
    """Download a shard if need be, and once more if what is there is damaged; returns its number of tokens."""
    path = download_known("fineweb", name, folder)
    try:
        return len(open_tokens(path, "uint16"))
    except UserError:
        path.unlink()
        return len(open_tokens(download_known("fineweb", name, folder), "uint16"))


def tell(folder):
    """One line on what was prepared; returns the folder."""
    meta = read_meta(folder)
    train, val = (sum(meta[split].values()) for split in SPLITS)
    print(f"prepared {folder}: {train:,} training and {val:,} validation tokens, tokenizer {meta['tokenizer']['name']} "
          f"with {meta['vocab_size']:,} ids", flush=True)
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# Reading tokens

def split_names(folder, split):
    """Names of a split's token files: train.bin, or shards such as fineweb_train_000001.bin in their order."""
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if re.fullmatch(rf"(.*[_.-])?{split}[_.-].*bin", name)]
    return [f"{split}.bin"] if f"{split}.bin" in names else shards


def is_token_folder(folder):
    return folder.is_dir() and any(split_names(folder, split) for split in SPLITS)


def read_meta(folder):
    """
    The checked content of a folder's meta.json: tokenizer (a spec), vocab_size, dtype, train and val ({file name:
    number of tokens}), source. A folder without one, but with token files, is taken to be GPT-2 BPE. Else UserError.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        return foreign_meta(Path(folder))
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        files = [*meta["train"].items(), *meta["val"].items()]
        good = (tokenizer_from_spec(meta["tokenizer"]).vocab_size == meta["vocab_size"]
                and meta["dtype"] in ("uint16", "uint32") and isinstance(meta["source"], dict)
                and all(Path(name).name == name and count >= 0 for name, count in files)
                and meta["train"] and meta["val"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        good = False
    if not good:
        raise UserError(f"{path} is damaged; delete {folder} and prepare it again")
    return meta


def foreign_meta(folder):
    """What meta.json would say of token files that another program made, as nanoGPT's openwebtext/prepare.py does."""
    if (folder / "meta.pkl").exists():
        raise UserError(f"{folder} holds tokens whose alphabet is in a pickle (meta.pkl), which is not read; prepare "
                        "their text instead")
    meta = GPT2_META | {"source": {}}
    for split in SPLITS:
        names = split_names(folder, split) if folder.is_dir() else []
        if not names:
            raise UserError(f"{folder} holds no {split}.bin; prepare the data again, or name a folder with both splits")
        meta[split] = {name: len(open_tokens(folder / name, "uint16")) for name in names}
    return meta


def open_tokens(path, dtype, promised=None, vocab_size=None):
    """
    A token file as a memory-mapped 1-D array. It may begin with a shard's header or be raw; the first bytes tell.
    UserError if it is missing, cut short, not of the `promised` number of tokens, or holds ids >= vocab_size.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; prepare the data again")
    offset, dtype, size = 0, np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(SHARD_HEADER_BYTES)[:size // 4 * 4], "<i4")
        count = size // dtype.itemsize
        if len(header) and header[0] == SHARD_MAGIC:
            offset, dtype = SHARD_HEADER_BYTES, np.dtype("<u2")
            if len(header) < SHARD_HEADER_BYTES // 4 or header[1] != 1:
                raise UserError(f"{path} has the header of a token shard, but not of version 1; download it again")
            count = int(header[2])
        if size != offset + count * dtype.itemsize or promised not in (None, count):
            raise UserError(f"{path} has {size:,} bytes, which are not the {count if promised is None else promised:,} "
                            "tokens it should hold: it was cut short or replaced; prepare the data again")
        if vocab_size is not None:  # one pass in flat memory: an id too high would end in a CUDA assertion
            file.seek(offset)
            while len(chunk := np.fromfile(file, dtype, 1 << 22)):
                if chunk.max() >= vocab_size:
                    raise UserError(f"{path} holds the id {chunk.max()}, but its tokenizer has only {vocab_size} ids; "
                                    "prepare the data again")
    if count == 0:  # nothing can be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,)).view(np.ndarray)


def open_splits(folder, meta, split, vocab_size=None):
    """All token files of one split, as a list of arrays."""
    return [open_tokens(folder / name, meta["dtype"], count, vocab_size) for name, count in meta[split].items()]


def load_tokens(folder, split):
    """TokenStream of a prepared folder's split, "train" or "val", after checking size and ids of every file."""
    meta = read_meta(folder)
    return TokenStream(open_splits(Path(folder), meta, split, meta["vocab_size"]))


class TokenStream:
    """All token files of one split, memory-mapped, read as one sequence."""

    def __init__(self, arrays):
        """arrays: 1-D integer arrays, which follow one another."""
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])
        self.begins = self.ends - [len(array) for array in arrays]

    def __len__(self):
        return int(self.ends[-1])

    def windows(self, starts, length):
        """The `length` tokens from each of starts (n,): (n, length) int64. IndexError beyond either end."""
        starts = np.asarray(starts)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"windows of {length} from {starts.min()} to {starts.max()} leave the {len(self)} tokens")
        if len(self.arrays) == 1:
            return sliding_window_view(self.arrays[0], length)[starts].astype(np.int64)
        first = np.searchsorted(self.ends, starts, side="right")  # the file in which each window begins
        whole = starts + length <= self.ends[first]
        out = np.empty((len(starts), length), np.int64)
        for i in np.unique(first[whole]):
            rows = whole & (first == i)
            out[rows] = sliding_window_view(self.arrays[i], length)[starts[rows] - self.begins[i]]
        for row in np.flatnonzero(~whole):  # across a seam: of every file what lies in the window, mostly nothing
            begins = np.maximum(starts[row] - self.begins, 0)
            ends = np.maximum(starts[row] + length - self.begins, 0)
            out[row] = np.concatenate([self.arrays[i][begins[i]:ends[i]] for i in range(len(self.arrays))])
        return out


# ----------------------------------------------------------------------------------------------------------------------
# Command line

class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message):
        raise UserError(f"{message}; see --help")


def make_parser():
    rows = [f"    {name:12} {row.about}\n{'':17}{row.disk} on disk; licence: {row.licence}"
            for name, row in DATASETS.items()]
    parser = Parser(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    description=__doc__ + "\ndata sets:\n\n" + "\n".join(rows))
    parser.add_argument("data", nargs="?", default="python", help="a data set above, or a path (default: python)")
    parser.add_argument("--tokenizer", default="auto", help="char, byte, gpt2 or any other name that tiktoken knows "
                        "(default: gpt2 for fineweb, arxiv and books, char for all else)")
    parser.add_argument("--out", metavar="DIR", help="folder of the result (default: data/NAME-TOKENIZER, see above)")
    parser.add_argument("--shards", type=int, help="fineweb: number of training shards (default: those there, else 1)")
    parser.add_argument("--limit", type=int, help="books: megabytes of text (default: those there, else 100)")
    return parser


def parse_args(argv):
    """argv -> argparse.Namespace; UserError for whatever cannot be understood."""
    parser = make_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        hint = closest(word, ("--tokenizer", "--out", "--shards", "--limit", "--help"))
        raise UserError(f"there is no option or second data set {word!r}{hint}; see --help")
    return options


def escape_unprintable():
    """A terminal that cannot show a character gets its escape, not a crash."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def stop(number, frame):
    raise KeyboardInterrupt(128 + number)


def main(argv=None):
    """Run one command line; returns the exit code. Whatever the user can mend ends in one line on stderr."""
    escape_unprintable()
    signal.signal(signal.SIGTERM, stop)
    try:
        options = parse_args(argv)
        prepare(options.data, options.tokenizer, options.out, options.shards, options.limit)
        return 0
    except UserError as e:
        message, code = str(e), e.code
    except KeyboardInterrupt as e:
        message, code = "stopped; run the same command again to go on", e.args[0] if e.args else 130
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
