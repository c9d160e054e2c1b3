"""Find an English text for the demo and print its path.

    python3 scripts/demo_text.py build/demo

Tiny Shakespeare, from ../shared/data, an earlier download or the network, so that the demo's figures are comparable between
machines. Without a network, Python's language reference.
"""
import hashlib
import pathlib
import re
import sys
import urllib.request

from command import note, status_of, whole

NAME = "tinyshakespeare.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def shakespeare(place):
    """Its bytes, or None."""
    try:
        data = urllib.request.urlopen(URL, timeout=10).read(10_000_000) if place is URL else place.read_bytes()
    except OSError as error:  # URLError and timeouts are OSErrors
        return note(f"text: no tiny Shakespeare from {place} ({error})")
    right = hashlib.sha256(data).hexdigest() == SHA256
    note(f"text: {'tiny Shakespeare' if right else 'not tiny Shakespeare, and not used'}, {len(data):,} bytes, from {place}")
    return data if right else None


def documentation():
    """Python's language reference. Its chapters are in a fixed random order, so that the end, for validation, is of the same kind."""
    from pydoc_data.topics import topics
    chapters = sorted(set(topics.values()), key=lambda text: hashlib.sha256(text.encode()).digest())
    note("text: Python's language reference instead")
    return re.sub(r"\n[ \t]+", "\n", "\n\n".join(chapters)).encode("ascii", errors="ignore")


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    places = [place for place in (pathlib.Path("../shared/data", NAME), path, URL) if place is URL or place.exists()]
    data = next(filter(None, map(shakespeare, places)), None)
    if data is None:
        data, path = documentation(), folder / "documentation.txt"
    with whole(path, "wb") as file:
        file.write(data)
    print(path)


if __name__ == "__main__":
    sys.exit(status_of(main))
