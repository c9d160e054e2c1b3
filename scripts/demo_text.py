"""Find English for the demo and print the path of the text file.

    python3 scripts/demo_text.py build/demo

Tiny Shakespeare if it is at hand (../shared/data, or downloaded by an earlier run) or can be downloaded, which makes the
demo's figures comparable from machine to machine. Without a network Python's own language reference will do.
"""
import hashlib
import os
import re
import sys
import urllib.request

NAME = "tinyshakespeare.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHARED = f"../shared/data/{NAME}"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def say(text):
    print(text, file=sys.stderr, flush=True)


def genuine(data):
    return hashlib.sha256(data).hexdigest() == SHA256


def shakespeare(earlier):
    for path in SHARED, earlier:
        if os.path.exists(path):
            with open(path, "rb") as file:
                data = file.read()
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
    if genuine(data):
        return data
    say(f"text: what came is not tiny Shakespeare ({len(data):,} bytes, wrong SHA-256), so it is not used")
    return None


def documentation():
    """Mixed, the same way each time, so that the part held out for validation is of the same kind as the rest."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    chapters = sorted(set(topics.values()), key=lambda text: hashlib.sha256(text.encode()).digest())
    data = re.sub(r"\n[ \t]+", "\n", "\n\n".join(chapters)).encode("ascii", errors="ignore")
    say(f"text: Python's language reference instead, {len(data):,} bytes")
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
