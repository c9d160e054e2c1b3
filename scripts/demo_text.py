"""Find about a megabyte of English for the demo and print the path of the text file.

    python3 scripts/demo_text.py build/demo

Tiny Shakespeare if it is at hand (../shared/data, or downloaded by an earlier run) or can be downloaded, which
makes the demo's figures comparable from machine to machine. Without a network the documentation that every
Linux machine carries will do: Python's language reference, licences, package notes, manuals in pod.
"""
import glob
import gzip
import hashlib
import os
import re
import sys
import urllib.request

NAME = "tinyshakespeare.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHARED = f"../shared/data/{NAME}"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
BYTES_WANTED = 1_500_000
LARGEST_FILE = 2_000_000
LARGEST_SHARE = 60_000  # of one document, lest a single list of changes set the tone
DOCUMENTATION = (  # the most readable first
    "/usr/share/common-licenses/*",
    "/usr/share/perl/**/*.pod",
    "/usr/share/perl5/**/*.pod",
    "/usr/share/doc/**/README*",
    "/usr/share/doc/**/NEWS*",
    "/usr/share/doc/**/copyright",
    "/usr/share/doc/**/changelog*",
)


def say(text):
    print(text, file=sys.stderr, flush=True)


def genuine(data):
    return hashlib.sha256(data).hexdigest() == SHA256


def read(path):
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            return file.read(LARGEST_FILE)
    except (OSError, EOFError):
        return b""


def shakespeare(earlier):
    for path in SHARED, earlier:
        data = read(path)
        if genuine(data):
            say(f"text: tiny Shakespeare, {len(data):,} bytes, from {path}")
            return data
    say(f"text: downloading tiny Shakespeare from {URL}")
    try:
        with urllib.request.urlopen(URL, timeout=10) as reply:
            data = reply.read(10_000_000)
    except OSError as error:  # URLError and timeouts are OSErrors
        say(f"text: no download ({error})")
        return None
    if not genuine(data):
        say(f"text: what came is not tiny Shakespeare ({len(data):,} bytes, wrong SHA-256), so it is not used")
        return None
    return data


def documents():
    """(name, text)"""
    try:
        from pydoc_data.topics import topics
        for name, text in sorted(topics.items()):
            yield f"python/{name}", text
    except ImportError:
        pass
    for pattern in DOCUMENTATION:
        for path in sorted(glob.glob(pattern, recursive=True)):
            if os.path.isfile(path):
                yield path, read(path).decode("utf-8", errors="replace")


def is_prose(paragraph):
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in paragraph)
    small_words = len(re.findall(r"\b(?:the|of|to|and|a|is|in)\b", paragraph))
    return len(paragraph) >= 80 and letters >= 0.85 * len(paragraph) and 60 * small_words >= len(paragraph)


def documentation():
    seen = set()
    found = []
    size = 0
    for name, text in documents():
        fresh = []
        for paragraph in re.split(r"\n(?:[ \t.]*\n)+", text):
            paragraph = re.sub(r"[ \t]+", " ", re.sub(r"\n[ \t]+", "\n", paragraph)).strip()
            key = paragraph.lower().replace("\n", " ")
            if is_prose(paragraph) and key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        if fresh:
            found.append((name, "\n\n".join(fresh)[:LARGEST_SHARE]))
            size += len(found[-1][1])
        if size >= BYTES_WANTED:
            break
    # Mixed, the same way each time, so that the part held out for validation is of the same kind as the rest.
    found.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    data = "\n\n".join(text for _, text in found).encode("ascii", errors="ignore")
    say(f"text: documentation of this machine instead, {len(data):,} bytes from {len(found)} documents")
    return data


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = sys.argv[1]
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, NAME)
    data = shakespeare(path)
    if data is None:
        path = os.path.join(directory, "documentation.txt")
        data = documentation()
        if len(data) < 100_000:
            sys.exit(f"error: only {len(data):,} bytes of English on this machine\n"
                     f"hint:  save {URL} as {os.path.join(directory, NAME)}")
    with open(path, "wb") as file:
        file.write(data)
    print(path)


if __name__ == "__main__":
    main()
